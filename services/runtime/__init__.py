"""One process: from its configuration file to its end.

service     build, ready, drain, stop
config      one TOML file a service, checked by a schema
notify      telling a service manager how the process is
tasks       background tasks that are named, kept and whose failure is seen
errors      domain errors; `services.rpc.status` has the table between them and gRPC status codes
files       what is read from files, and follows them while the process runs
pauses      growing pauses between attempts
checksum    a checksum of large memory that host and GPU compute alike
heap        how the C library keeps what a process has freed
"""
