"""What every rehearsal host gets."""

bringup_stack = "lab"
bringup_reboot = "allowed"
