"""What every host of every inventory beside this directory gets; a host's own data goes before it."""

from bringup.ssh import connect_options, known_hosts_file

# An unknown or changed host key refuses that host; `bringup trust` records keys.
ssh_strict_host_key_checking = "yes"
ssh_known_hosts_file = known_hosts_file()
ssh_paramiko_connect_kwargs = connect_options()

bringup_stack = "sglang-cu130"
bringup_reboot = "never"
