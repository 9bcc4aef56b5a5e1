"""The rehearsal hosts of the lab that is up, as ``bringup lab up`` wrote them down."""

import json

from bringup.errors import InputError
from bringup.lab.layout import Layout, default_state_dir


def _hosts() -> "list[tuple[str, dict[str, object]]]":
    record = Layout(default_state_dir()).record
    if not record.exists():
        raise InputError("no lab is up", why=f"there is no {record}", hint="bringup lab up")
    lab = json.loads(record.read_text())
    return [
        (
            name,
            {
                "ssh_hostname": host["address"],
                "ssh_user": "root",
                "ssh_key": lab["ssh"]["key"],
                "ssh_known_hosts_file": lab["ssh"]["known_hosts"],
            },
        )
        for name, host in sorted(lab["hosts"].items())
    ]


lab = _hosts()
