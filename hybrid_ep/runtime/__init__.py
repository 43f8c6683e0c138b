"""What a buffer is made of, below its public verbs: the session of one engine, options, topology, how ranks meet,
devices, plans and handles, tensors on their way into the core. May import hardware and payload, never the model, the
explorer or the command line."""
