"""Traffic classes of the compute network: what marks packets, what arbiters are told, and whether
it is in force. Nothing here needs NIXL, an engine or hardware to be imported."""
