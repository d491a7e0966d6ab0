"""What is kept, for how long, and that every answer's tensors are."""

import weakref

from python_backend_models.delayed_release import DelayedRelease


class Thing:
    pass


def test_things_stay_for_their_time_and_no_longer() -> None:
    now_s = 0.0
    release = DelayedRelease(keep_s=2.0, clock=lambda: now_s)
    first, second = Thing(), Thing()
    seen = [weakref.ref(first), weakref.ref(second)]
    release.keep([first])
    del first
    now_s = 1.0
    release.keep([second])
    del second
    release.purge()
    assert all(reference() for reference in seen)
    now_s = 2.0
    release.purge()
    assert seen[0]() is None
    assert seen[1]() is not None
    now_s = 3.5
    release.keep([Thing()])  # keeping lets go, too
    assert seen[1]() is None


def test_what_is_let_go_may_keep_something_itself() -> None:
    release = DelayedRelease(keep_s=0.0)

    class Heir:
        def __del__(self) -> None:
            release.keep("last words")

    release.keep(Heir())
    release.purge()
