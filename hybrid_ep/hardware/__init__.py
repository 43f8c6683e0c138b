"""Numbers of machines that the runtime and the performance model both read, each with its source; how many ranks a
token needs; and which NICs this host has. Imports nothing of hybrid_ep."""
