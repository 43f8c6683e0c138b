"""Stages of run_tests.py that run two at a time, for each waits much or computes on one core; what each prints is shown
when it has ended."""

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

AT_ONCE = 2


def usable_cores():
    return len(os.sched_getaffinity(0))


def two_at_a_time(names, after, beside, runners, work, give_up):
    """{name: result of work(name, runner)}, begun in the order of `names`.

    after: {name: the names that have to end before it begins}. beside: names that count for none, for they wait nearly
    all their time. runners(cores): one that keeps what it has to say, for commands that use so many. give_up(): ends
    what else a stage waits for, where one raises or all is interrupted."""
    cores = usable_cores()
    most = min(AT_ONCE, cores)
    waiting, going, results = list(names), {}, {}

    def next_name():
        running = {name for name, _ in going.values()}
        full = len(running.difference(beside)) >= most
        unfinished = running.union(waiting)
        free = (n for n in waiting if unfinished.isdisjoint(after.get(n, ())))
        return next((n for n in free if n in beside or not full), None)

    with ThreadPoolExecutor(len(names)) as pool:
        try:
            while waiting or going:
                while name := next_name():
                    waiting.remove(name)
                    print(f"... {name} begins", flush=True)
                    runner = runners(max(1, min(AT_ONCE, cores // most)))
                    going[pool.submit(work, name, runner)] = (name, runner)
                for done in wait(going, return_when=FIRST_COMPLETED).done:
                    name, runner = going.pop(done)
                    show(name, runner)
                    results[name] = done.result()
        except BaseException:
            for _, runner in going.values():
                runner.end()
            give_up()
            wait(going)
            for name, runner in going.values():
                show(name, runner)
            raise
    return results


def show(name, runner):
    print(f"\n=== {name}\n" + "".join(runner.said), end="", flush=True)
