"""The order of things for ``verify --across``: as in ``deploy.py``, but each operation on all hosts before the next."""

from tasks import across, lock, preflight, verify

lock.take()
preflight.check()
verify.prove()
across.measure()
lock.release()
