"""A second statement of what unjam.pipeline.simulate says, for tests: tick by tick, whole numbers.

Each rank is a generator that yields while it waits; a tick ends when nobody moves any more. Nothing
of unjam is used, so that a mistake would have to be made twice. Actions are tuples (stage, kind,
microbatch), messages (source, target, microbatch); times of actions are 1 or more.
"""

import functools


class Ticks:
    """Runs `rows` in a mode; afterwards `ends` (of actions), `time`, and `stuck` (ranks)."""

    def __init__(self, rows, time_of, edges, mode):
        self.rows, self.time_of, self.edges, self.mode = rows, time_of, edges, mode
        self.rank_of = {a[0]: rank for rank, row in enumerate(rows) for a in row}
        self.now = 0
        self.ends, self.starts = {}, {}
        self.offered, self.accepted, self.arrived = set(), set(), set()
        self.queues, self.flying = {}, {}
        self.moved = False
        if mode == "serial":
            free = Ticks(rows, time_of, edges, "signal")
            if free.stuck:  # no order of transfers helps
                self.stuck = free.stuck
                return
            self.plans = self._agreed_plans(free)
        self._loop()

    # ---- the graph ----

    def inputs(self, action):
        stage, kind, microbatch = action
        if kind == "F":
            return [(i, stage, microbatch) for i, j in sorted(self.edges) if j == stage]
        if kind in "BI":
            return [(j, stage, microbatch) for i, j in sorted(self.edges) if i == stage]
        return []

    def outputs(self, action):
        stage, kind, microbatch = action
        if kind == "F":
            return [(stage, j, microbatch) for i, j in sorted(self.edges) if i == stage]
        if kind in "BI":
            return [(stage, i, microbatch) for i, j in sorted(self.edges) if j == stage]
        return []

    def inside(self, message):
        return self.rank_of[message[0]] == self.rank_of[message[1]]

    def length(self, message):
        if self.mode == "signal":
            return 0
        source, target, _ = message
        both = self.edges[min(source, target), max(source, target)]
        return both[0] if source < target else both[1]

    # ---- ranks ----

    def rank(self, rank):
        if self.mode == "serial":
            yield from self.serial(rank)
        elif self.mode == "fused":
            yield from self.fused(rank)
        else:
            yield from self.overlapped(rank)

    def compute(self, action):
        while not all(m in self.arrived for m in self.inputs(action) if self.inside(m)):
            yield
        self.starts[action] = self.now
        until = self.now + self.time_of(action)
        while self.now < until:
            yield
        self.ends[action] = self.now
        self.arrived.update(m for m in self.outputs(action) if self.inside(m))

    def wait(self, messages):
        while not all(m in self.arrived for m in messages):
            yield

    def offer(self, message):
        self.offered.add(message)
        self.queues.setdefault(message[:2], []).append(message)

    def overlapped(self, rank):
        for action in self.rows[rank]:
            far = [m for m in self.inputs(action) if not self.inside(m)]
            self.accepted.update(far)
            yield from self.wait(far)
            yield from self.compute(action)
            for message in self.outputs(action):
                if not self.inside(message):
                    self.accepted.add(message)  # receivers are always ready
                    self.offer(message)

    def fused(self, rank):
        background, last = [], None
        for action in [*self.rows[rank], None]:
            sends = [m for m in self.outputs(last) if not self.inside(m)] if last else []
            takes = [m for m in self.inputs(action) if not self.inside(m)] if action else []
            alike = last and action and (last[1] == "F") == (action[1] == "F")
            if not alike or sends:
                yield from self.wait(background)
                background = []
            for message in sends:
                self.offer(message)
            self.accepted.update(takes)
            if alike:
                background += sends
                yield from self.wait(takes)
            else:
                yield from self.wait(sends + takes)
            if action:
                yield from self.compute(action)
            last = action

    def serial(self, rank):
        for what in self.plans[rank]:
            if isinstance(what[1], str):
                yield from self.compute(what)
            else:
                if self.rank_of[what[0]] == rank:
                    self.offer(what)
                else:
                    self.accepted.add(what)
                yield from self.wait([what])

    # ---- serial's order ----

    def _agreed_plans(self, free):
        gives = {m: a for row in self.rows for a in row for m in self.outputs(a)}
        takes = {m: a for row in self.rows for a in row for m in self.inputs(a)}
        before = {}
        for row in self.rows:
            for earlier, later in zip(row, row[1:], strict=False):
                before[later] = earlier

        @functools.cache
        def depth(action):
            found = [depth(gives[m]) for m in self.inputs(action)]
            if action in before:
                found.append(depth(before[action]))
            return 1 + max(found, default=0)

        def due(m):
            return (free.ends[gives[m]], free.starts[takes[m]], depth(gives[m]), m)

        plans = []
        for rank, row in enumerate(self.rows):
            mine = sorted(
                (m for m in gives if not self.inside(m) and rank in map(self.rank_of.get, m[:2])),
                key=due,
            )
            plan = []
            for action in row:
                # Actions take time here: what is ready when one starts comes before it, but for
                # what is ready just then and has the longer chain behind it.
                while mine and due(mine[0])[::2][:2] < (free.starts[action], depth(action)):
                    plan.append(mine.pop(0))
                plan.append(action)
            plans.append(plan + mine)
        return plans

    # ---- time ----

    def _loop(self):
        ranks = {rank: self.rank(rank) for rank in range(len(self.rows))}
        most = 10 + sum(self.time_of(a) for row in self.rows for a in row)
        most += sum(self.length(m) for row in self.rows for a in row for m in self.outputs(a))
        while ranks and self.now <= most:
            self._tick(ranks)
            self.now += 1
        self.time = self.now - 1
        self.stuck = sorted(ranks)

    def _tick(self, ranks):
        while True:
            before = self._state(ranks)
            for rank in list(ranks):
                try:
                    next(ranks[rank])
                except StopIteration:
                    del ranks[rank]
            for link, queue in self.queues.items():
                message, until = self.flying.get(link, (None, 0))
                if message is not None and until <= self.now:
                    self.arrived.add(message)
                    del self.flying[link]
                if link not in self.flying and queue and queue[0] in self.accepted:
                    message = queue.pop(0)
                    self.flying[link] = (message, self.now + self.length(message))
            if self._state(ranks) == before:
                return

    def _state(self, ranks):
        return (
            len(ranks), len(self.ends), len(self.starts), len(self.offered), len(self.accepted),
            len(self.arrived), dict(self.flying),
        )  # fmt: skip
