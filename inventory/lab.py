"""The rehearsal hosts of the lab that is up, as ``bringup lab up`` wrote them down."""

from bringup.lab.record import inventory

lab = inventory()
