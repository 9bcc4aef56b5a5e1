"""This machine. A reboot is never made here; bringup says what to run after you made it."""

local = ["@local"]
