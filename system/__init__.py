"""The ground: what the operating system offers, and how this process may use it.

    resources.py      cores and bytes, limited by affinity and control groups
    descriptors.py    how many files may be open
    shared_memory.py  memory that processes share, and how they find it
    forking.py        forking while other threads run, or Ctrl-C comes
    wakeup.py         waking a selector without releasing the GIL, and weak callbacks
    file_locks.py     locks that end with the process that holds them
    run_queue.py      how long threads waited for a core
    printing.py       how stages print
    garbage.py        collections of garbage that come later

Nothing here knows about samples or batches.
"""
