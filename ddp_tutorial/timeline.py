"""What a process did in a training step, and when, from a torch.profiler trace."""

COMPUTE = ("forward", "backward", "finish", "optimizer")


def lanes_of(profiler):
    """The last step in a finished ``torch.profiler.profile``, as ``{"compute": events, "messages": events}``.

    An event is ``[name, start, end]``, in milliseconds since the profile's first forward pass began. Compute events
    are the ``record_function`` blocks called as in COMPUTE; messages are what the backend carried, such as
    ``gloo:all_reduce``. A step ends with its optimizer's.
    """
    found = {"compute": [], "messages": []}
    for event in profiler.events():
        entry = [event.name, event.time_range.start / 1000, event.time_range.end / 1000]
        if event.name in COMPUTE:
            found["compute"].append(entry)
        elif event.name.startswith(("gloo:", "nccl:")):
            found["messages"].append(entry)
    found = {lane: sorted(events, key=lambda event: event[1]) for lane, events in found.items()}
    zero = next(start for name, start, _ in found["compute"] if name == "forward")
    ends = [end for name, _, end in found["compute"] if name == "optimizer"]
    first, last = ends[-2] if len(ends) > 1 else zero, ends[-1]
    return {
        lane: [[name, start - zero, end - zero] for name, start, end in events if first <= start < last]
        for lane, events in found.items()
    }
