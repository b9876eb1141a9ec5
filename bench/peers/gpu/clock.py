"""Times of work on the GPU, in turns, with a cold L2; and what the GPU's clocks were meanwhile."""

import statistics
import subprocess
import threading
import time

import torch

FLUSHED_BYTES = 256 << 20
WARM_UP = 2
# Before each turn the GPU spins, so long at least that the host is ahead of it: what Python and launches cost hides.
LEAST_REST = 60e-6
CYCLES_PER_SECOND = 2e9


class Clock:
    """rest: how many times as long as it works the GPU rests before each turn.

    Without a rest a large product soon works at the limit of the GPU's power, and its clock falls by a fifth: then
    whoever comes later in a run is slower.
    """

    def __init__(self, rest):
        self.rest = rest
        self.flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def turn(self, call, rest):
        """Enqueues a call that is not timed, which brings its code near, and one that is, in a cold L2: two events."""
        torch.cuda._sleep(int(CYCLES_PER_SECOND * max(LEAST_REST, rest)))
        call()
        self.flushed.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        return start, end

    def rounds(self, calls, count, warm_up=WARM_UP):
        """Seconds of each call in each of `count` rounds, a list a call. Each round begins with another."""
        times = [[] for _ in calls]
        for number in range(warm_up + count):
            turns = [(i + number) % len(calls) for i in range(len(calls))]
            works = [2 * t[-1] if t else 0 for t in times]
            events = [self.turn(calls[i], self.rest * works[i]) for i in turns]
            torch.cuda.synchronize()
            for i, (start, end) in zip(turns, events):
                times[i].append(start.elapsed_time(end) * 1e-3)
        return [t[warm_up:] for t in times]

    def finalists(self, settings, keep, rounds=9):
        """Of {setting: call} the `keep` fastest: two runs of all, more of the better ones."""
        for left, count in ((8 * keep, 2), (keep, rounds)):
            if len(settings) > left:
                times = self.rounds(list(settings.values()), count, warm_up=1)
                seconds = {name: statistics.median_low(t) for name, t in zip(settings, times)}
                settings = {name: settings[name] for name in sorted(seconds, key=seconds.get)[:left]}
        return settings


class Monitor:
    """Clocks, power and temperature as nvidia-smi tells them, several times a second. It changes nothing."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __init__(self, device=0):
        self.samples = []
        command = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(self.FIELDS)}"]
        command += ["--format=csv,noheader,nounits", "--loop-ms=200"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                values = [float(text) for text in line.split(",")]
            except ValueError:  # a field that this GPU does not tell
                continue
            self.samples.append((time.monotonic(), values))

    def since(self, start):
        """{field: [lowest, highest]} since a time of time.monotonic(), or of the last sample before."""
        meanwhile = [values for at, values in self.samples if at >= start] or [v for _, v in self.samples[-1:]]
        columns = list(zip(*meanwhile))
        return {name: [min(c), max(c)] for name, c in zip(self.FIELDS, columns)}

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()


def gpu_facts():
    """Name, driver and limits, for the heading."""
    fields = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    try:
        ran = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True
        )
        names = ("gpu", "driver", "power_limit", "highest_sm_clock", "highest_memory_clock")
        return dict(zip(names, ran.stdout.strip().split("\n")[0].split(", ")))
    except FileNotFoundError:
        return {"gpu": torch.cuda.get_device_name()}
