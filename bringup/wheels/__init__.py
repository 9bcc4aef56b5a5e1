"""Read wheels where they lie: metadata, and what their shared objects need, without downloading them."""

from bringup.wheels.archive import Archive, Member
from bringup.wheels.listing import Indexes, Offer, built_in_index, newest
from bringup.wheels.reader import WheelReader, reader
from bringup.wheels.reading import WheelFacts, machine_of, metadata_of, read_wheel, record_of, text_of
from bringup.wheels.remote import HttpFile, LocalFile, Source, open_local, open_source

__all__ = [
    "Archive",
    "HttpFile",
    "Indexes",
    "LocalFile",
    "Member",
    "Offer",
    "Source",
    "WheelFacts",
    "WheelReader",
    "built_in_index",
    "machine_of",
    "metadata_of",
    "newest",
    "open_local",
    "open_source",
    "read_wheel",
    "reader",
    "record_of",
    "text_of",
]
