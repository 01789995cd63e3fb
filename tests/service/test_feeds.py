"""What requests that come at the same time share."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from packs import build_dataset, numbered_packs

from packer.manifest import Manifest
from packer.store import LocalStore
from service.feeds import Feeds
from service.problems import Problem


class SlowStore(LocalStore):
    def __init__(self, root):
        super().__init__(root)
        self.num_asked, self.answers = 0, threading.Event()

    def exists(self, key):
        self.num_asked += 1
        self.answers.wait(60)
        return super().exists(key)


def test_ranks_that_come_at_once_ask_the_store_once(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    store = SlowStore(tmp_path)

    async def run():
        with ThreadPoolExecutor(4) as executor:
            feeds = Feeds(store, executor)
            asking = [asyncio.create_task(feeds.get(dataset)) for _ in range(8)]
            await asyncio.sleep(0.05)
            asking[0].cancel()  # who goes away takes nothing from the others
            await asyncio.sleep(0)
            store.answers.set()
            found = await asyncio.gather(*asking[1:])
            assert len(set(map(id, found))) == 1
            assert store.num_asked == 1
            await feeds.get(dataset)
            assert store.num_asked == 2  # who comes later wants to know how it is then
            with pytest.raises(Problem):
                await feeds.get("0" * 32)

    asyncio.run(run())


def test_who_waits_for_more_hears_of_a_look_that_failed(tmp_path, monkeypatch):
    """Whatever it failed of: else every stream of the dataset would wait for ever."""
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2, finished=False)

    async def run():
        with ThreadPoolExecutor(4) as executor:
            feed = await Feeds(LocalStore(tmp_path), executor).get(dataset)
            seen = await feed.fresh()
            waiting = [asyncio.create_task(feed.after(seen)) for _ in range(3)]
            await asyncio.sleep(0.05)
            monkeypatch.setattr(Manifest, "refresh", lambda _: 1 / 0)
            found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
            assert [type(one) for one in found] == [ZeroDivisionError] * 3
            monkeypatch.undo()
            again = asyncio.create_task(feed.after(seen))  # the next one looks anew
            await asyncio.sleep(0.2)
            assert not again.done()
            feed.close()
            with pytest.raises(Problem):
                await asyncio.wait_for(again, 60)

    asyncio.run(run())
