"""One process, from its configuration file to its end.

service     build, ready, drain, stop
config      one TOML file a service, checked by a schema
docstrings  what classes of settings say of their fields
notify      reports to a service manager how the process is
tasks       background tasks that are named, kept and whose failure is seen
files       what is read from files, and follows them while the process runs
progress    how far long work is, as a bar on a terminal or as lines elsewhere
pauses      growing pauses between attempts
checksum    a checksum of large memory that host and GPU compute alike
heap        how the C library keeps what a process has freed
"""
