"""What does a checkpoint hold, and in which bytes?

Python state becomes a tree of JSON and a table of live tensors (``tree``, ``paths``, ``registry``), the tensors become
safetensors files (``tensors``, ``container``), the files get digests by part (``digest``); ``rng`` gathers the random
generators. Nothing here touches a store, and nothing here reads or writes a pickle.
"""
