"""The order of things for a rollback, run as ``deploy.py`` is."""

from tasks import lock, switch

lock.take()
switch.roll_back()
lock.release()
