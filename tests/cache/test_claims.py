"""One of all who want a key gets it, and nobody waits forever."""

# ruff: noqa: SLF001 what cannot be brought about from outside is done inside

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cache import cache as module
from penstock.cache.cache import Claims, finished
from support.forked import End, forked

KEY = bytes(range(16))
OTHER = bytes(range(100, 116))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def claims(path: Path) -> Iterator[Claims]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    yield Claims(descriptor)
    os.close(descriptor)


def claim(claims: Claims, key: bytes) -> threading.Event:
    """Claim a key, as a thread does."""
    return finished(claims.claim(key, in_loop=False))


def is_ours(claims: Claims, claim: threading.Event, key: bytes = KEY) -> bool:
    return claims._mine.get(key) is claim


def holder(path: Path) -> Claims:
    """Return the child's own claims, which end with it."""
    return Claims(os.open(path, os.O_RDWR))


def test_one_thread_at_a_time_has_a_key(claims: Claims) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            mine = claim(claims, KEY)
            assert is_ours(claims, mine)
            inside += 1
            most = max(most, inside)
            inside -= 1
            claims.free(KEY, mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_key_that_is_freed_goes_to_a_waiter(claims: Claims) -> None:
    mine, other = claim(claims, KEY), claim(claims, OTHER)
    assert is_ours(claims, mine)
    assert is_ours(claims, other, OTHER)
    got: list[threading.Event] = []
    waiting = threading.Thread(target=lambda: got.append(claim(claims, KEY)))
    waiting.start()
    claims.free(KEY, mine)
    waiting.join()
    assert is_ours(claims, got[0])
    claims.free(KEY, mine)  # it is not ours any more
    assert is_ours(claims, got[0])
    claims.free(KEY, got[0])
    claims.free(OTHER, other)


def test_a_thread_that_frees_a_key_wakes_those_of_its_process(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(module, "MAX_PAUSE_S", 60.0)
    mine = claim(claims, KEY)
    waits = threading.Event()
    tries = claims._try

    def noted(key: bytes, claim: threading.Event) -> threading.Event:
        owner = tries(key, claim)
        waits.set()
        return owner

    monkeypatch.setattr(claims, "_try", noted)
    got: list[threading.Event] = []
    other = threading.Thread(target=lambda: got.append(claim(claims, KEY)))
    other.start()
    assert waits.wait(60)
    claims.free(KEY, mine)
    other.join(30)
    assert is_ours(claims, got[0])
    claims.free(KEY, got[0])


def test_a_cache_does_not_wait_for_what_another_computes(
    claims: Claims, path: Path
) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        for namespace in range(64):
            claim(mine, namespace.to_bytes(8, "little") + KEY[8:])
        end.tell("has them")
        end.hear()

    with forked(work) as child:
        assert child.hear() == "has them"
        mine = claim(claims, KEY)
        assert is_ours(claims, mine)
    claims.free(KEY, mine)


def test_one_process_at_a_time_has_a_key(claims: Claims, path: Path) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        its = claim(mine, KEY)
        end.tell("has it")
        end.hear()
        mine.free(KEY, its)

    with forked(work) as child:
        assert child.hear() == "has it"
        mine = threading.Event()
        assert claims._try(KEY, mine) is not mine
        child.tell("free it")
        mine = claim(claims, KEY)
        assert is_ours(claims, mine)
    claims.free(KEY, mine)


def test_the_claim_of_a_killed_process_is_free(claims: Claims, path: Path) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        claim(mine, KEY)
        end.tell("has it")
        end.hear()

    with forked(work) as child:
        assert child.hear() == "has it"
        child.kill()
        mine = claim(claims, KEY)
        assert is_ours(claims, mine)
    claims.free(KEY, mine)


def test_a_stopped_process_delays_others_only_for_a_while(
    claims: Claims, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        claim(mine, KEY)
        end.tell("has it")
        end.hear()

    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with forked(work) as child:
        assert child.hear() == "has it"
        child.signal(signal.SIGSTOP)
        assert not is_ours(claims, claim(claims, KEY))
        late = asyncio.run(claims.claim(KEY, in_loop=True))
        assert not is_ours(claims, late)


def test_a_thread_that_takes_long_blocks_nobody(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    mine = claim(claims, KEY)
    assert not is_ours(claims, claim(claims, KEY))
    late = asyncio.run(claims.claim(KEY, in_loop=True))
    assert not is_ours(claims, late)
    claims.free(KEY, late)
    assert is_ours(claims, mine)
    claims.free(KEY, mine)


def test_one_coroutine_at_a_time_has_a_key(claims: Claims) -> None:
    inside = most = 0

    async def work() -> bool:
        nonlocal inside, most
        mine = await claims.claim(KEY, in_loop=True)
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        ours = is_ours(claims, mine)
        claims.free(KEY, mine)
        return ours

    async def main() -> list[bool]:
        return await asyncio.gather(*(work() for _ in range(8)))

    assert all(asyncio.run(main()))
    assert most == 1


def test_a_coroutine_that_is_cancelled_leaves_the_claim_alone(claims: Claims) -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(claims.claim(KEY, in_loop=True))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        claims.free(KEY, mine)
        again = await claims.claim(KEY, in_loop=True)
        assert is_ours(claims, again)
        claims.free(KEY, again)

    mine = claim(claims, KEY)
    asyncio.run(main())
