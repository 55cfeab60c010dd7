"""A shared object launches from many threads at once, takes no memory in doing so, and refuses a forked child."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import attnres_aot

HIDDEN = 1024
THREADS, LAUNCHES = 8, 20_000


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4


def in_threads(work) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_launch_one_object_with_operands_of_their_own(stub, make, weights, key, operands, helpers):
    consumer = make(weights, key)
    given = [operands(rows=1 + number % 3) for number in range(THREADS)]
    tensors = [[helpers.gpu(tensor) for tensor in each.ordinary] for each in given]

    def work(number: int) -> None:
        for _ in range(200):
            consumer.run(*tensors[number])

    in_threads(work)
    assert stub.launch_count() == THREADS * 200
    launches = [stub.launch(index) for index in range(THREADS * 200)]
    found = Counter(launch.arguments()["out"] for launch in launches)
    assert found == {each.out.data_ptr(): 200 for each in given}
    by_out = {each.out.data_ptr(): each for each in given}
    for launch in launches:
        arguments, mine = launch.arguments(), by_out[launch.arguments()["out"]]
        assert arguments["source"] == mine.delta.data_ptr()
        assert arguments["rows"] == launch.grid[0] == len(mine.out)


def test_launches_take_no_memory(stub, make, weights, key, operands, helpers):
    consumer = make(weights, key)
    tensors = [helpers.gpu(tensor) for tensor in operands(rows=2).ordinary]
    stub.lib.stub_record(0)

    def work(number: int) -> None:
        for _ in range(LAUNCHES):
            consumer.run(*tensors)

    in_threads(work)
    before = resident_kb()
    in_threads(work)
    assert stub.launch_count() == 2 * THREADS * LAUNCHES
    assert resident_kb() - before < 1000


def test_objects_are_made_and_let_go_of_without_growth(stub, module, weights, operands, helpers):
    tensors = [helpers.gpu(tensor) for tensor in operands(rows=2).ordinary]
    mailbox = helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    bound = [helpers.gpu(weight) for weight in weights]
    stub.lib.stub_record(0)

    def once() -> None:
        consumer = module.prepare_consumer(*bound, 2, True, -1, False, 1e-5, 1e-5)
        consumer.bind_ring(mailbox, 3)
        consumer.run(*tensors)
        consumer.run_ring(*tensors[1:])
        consumer.bind_aux()
        consumer.plan_run(*tensors)

    for _ in range(200):
        once()
    before = resident_kb()
    for _ in range(3000):
        once()
    assert resident_kb() - before < 2000


def test_a_forked_child_is_refused(stub, make, module, weights, key, operands, helpers):
    consumer = make(weights, key)
    tensors = [helpers.gpu(tensor) for tensor in operands(rows=2).ordinary]
    consumer.run(*tensors)
    launch = consumer.plan_run(*tensors)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        told = []
        for call in (
            lambda: consumer.run(*tensors),
            lambda: launch(0, 16, 32, 48, 64),
            lambda: module.load_table(0),
        ):
            try:
                call()
                told.append("launched")
            except attnres_aot.errors.DriverError as error:
                told.append(str(error)[:28])
        os.write(writer, "|".join(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).decode().split("|") == ["this process was forked afte"] * 3
    consumer.run(*tensors)
