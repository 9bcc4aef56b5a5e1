"""A fleet: copy this file, name your hosts, record their keys with `bringup trust inventory/fleet.py`.

Every list is a group. Data that a whole group shares stands in `group_data/GROUP.py` beside this file; data of
one host stands with the host. The keys that bringup reads are in docs/reference/inventory.md.
"""

h200 = [
    ("h200-01", {"ssh_hostname": "192.0.2.11", "rack": "a1"}),
    ("h200-02", {"ssh_hostname": "192.0.2.12", "rack": "a1"}),
    ("h200-03", {"ssh_hostname": "192.0.2.21", "rack": "a2"}),
]

rtx_pro = [
    # This one boots another stack than its group while it is tried there.
    ("rtx-01", {"ssh_hostname": "192.0.2.31", "rack": "b1", "bringup_stack": "sglang-cu130"}),
]
