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

from penstock.cache import tiers as module
from penstock.cache.cache import finished
from penstock.cache.tiers import Claim, Claims, blocking_sleep
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


def claim(claims: Claims, key: bytes) -> Claim:
    """Claim a key, as a thread does."""
    return finished(claims.claim(key, blocking_sleep))


def told(claim: Claim) -> tuple[bool, bool]:
    return claim.ours, claim.waited


def holder(path: Path) -> Claims:
    """Return the child's own claims, which end with it."""
    return Claims(os.open(path, os.O_RDWR))


def test_one_thread_at_a_time_has_a_key(claims: Claims) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            assert claim(claims, KEY).ours
            inside += 1
            most = max(most, inside)
            inside -= 1
            claims.free(KEY)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (inside, most) == (0, 1)


def test_a_key_that_is_freed_goes_to_a_waiter(claims: Claims) -> None:
    assert told(claim(claims, KEY)) == (True, False)
    assert told(claim(claims, OTHER)) == (True, False)
    got: list[Claim] = []
    waiting = threading.Thread(target=lambda: got.append(claim(claims, KEY)))
    waiting.start()
    claims.free(KEY)
    waiting.join()
    assert got[0].ours
    claims.free(KEY)
    claims.free(OTHER)


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
        assert told(claim(claims, KEY)) == (True, False)
    claims.free(KEY)


def test_one_process_at_a_time_has_a_key(claims: Claims, path: Path) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        claim(mine, KEY)
        end.tell("has it")
        end.hear()
        mine.free(KEY)

    with forked(work) as child:
        assert child.hear() == "has it"
        assert not claims._try(KEY)
        child.tell("free it")
        assert claim(claims, KEY).ours
    claims.free(KEY)


def test_the_claim_of_a_killed_process_is_free(claims: Claims, path: Path) -> None:
    def work(end: End) -> None:
        mine = holder(path)
        claim(mine, KEY)
        end.tell("has it")
        end.hear()

    with forked(work) as child:
        assert child.hear() == "has it"
        child.kill()
        assert told(claim(claims, KEY)) == (True, False)
    claims.free(KEY)


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
        assert told(claim(claims, KEY)) == (False, True)
        late = asyncio.run(claims.claim(KEY, asyncio.sleep))
        assert told(late) == (False, True)


def test_a_thread_that_takes_long_blocks_nobody(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    claim(claims, KEY)
    assert told(claim(claims, KEY)) == (False, True)
    late = asyncio.run(claims.claim(KEY, asyncio.sleep))
    assert told(late) == (False, True)
    claims.free(KEY)


def test_one_coroutine_at_a_time_has_a_key(claims: Claims) -> None:
    inside = most = 0

    async def work() -> bool:
        nonlocal inside, most
        mine = await claims.claim(KEY, asyncio.sleep)
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        claims.free(KEY)
        return mine.ours

    async def main() -> list[bool]:
        return await asyncio.gather(*(work() for _ in range(8)))

    assert all(asyncio.run(main()))
    assert most == 1


def test_a_coroutine_that_is_cancelled_leaves_the_claim_alone(claims: Claims) -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(claims.claim(KEY, asyncio.sleep))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        claims.free(KEY)
        assert (await claims.claim(KEY, asyncio.sleep)).ours
        claims.free(KEY)

    claim(claims, KEY)
    asyncio.run(main())
