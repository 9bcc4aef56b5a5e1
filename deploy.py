"""The order of things for one host. ``pyinfra inventory/x.py deploy.py`` works as it is."""

from pyinfra import config

from tasks import cuda, driver, environment, linker, lock, preflight, switch, verify

config.REQUIRE_PYINFRA_VERSION = "~=3.10.0"

lock.take()
preflight.check()
driver.install()
cuda.install()
linker.register()
environment.build()
verify.prove()
switch.cut_over()
lock.release()
