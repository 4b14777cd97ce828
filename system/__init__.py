"""The ground: what the operating system gives, and how this process may use it.

    resources.py       cores and bytes, by affinity and control groups
    descriptors.py     how many files may be open
    shared_memory.py   memory that processes share
    forking.py         forking beside threads
    wakeup.py          waking a selector without letting go of the GIL
    file_locks.py      locks that end with the process that holds them
    run_queue.py       how long threads had no core to run on
    runtime_folder.py  where this user's processes find one another
    printing.py        how stages print

Nothing here knows of samples or batches.
"""
