"""Counters of worker processes reach the API server's registry, by files or natively."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tilewise import counters, exporter, side_port
from tilewise.errors import UnsupportedConfig

WORKER = """
    import os, sys
    from tilewise import counters, exporter
    rank, steps, version = (*sys.argv[1:], "1.0")[:3]
    exporter.start({"engine": "0", "rank": rank})
    counters.add("steps", int(steps), path="decode")
    counters.add("launches", 3 * int(steps), kernel="decode")
    counters.add("fallback_layers", 2, reason="soft cap", target="FLASH_ATTN")
    counters.grow("workspace_bytes", 1000)
    counters.put("build_info", 1, version=version, vllm="2", torch="3", triton="4")
    for value in (1e-5, 1e-3, 5.0):
        counters.observe("build_seconds", value)
    exporter.flush()
"""
KILLED = f"{WORKER}    os.kill(os.getpid(), 9)\n"
READER = """
    import os
    from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess
    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    else:
        from tilewise import exporter
        exporter.prepare()
    print(generate_latest(registry).decode())
"""


def run(code, *args, rc=0, prefix=(), **environ):
    ours = (exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE, side_port.LISTENER_VARIABLE)
    env = {k: v for k, v in os.environ.items() if k not in ours}
    # All these processes are of one server.
    env[exporter.SINCE_VARIABLE] = "0"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code), *args], env=env | environ,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == rc, done.stderr
    return done


def samples(text):
    """``{"name{labels}": value}`` of all our samples, labels in alphabetical order."""
    lines = [line for line in text.splitlines() if line.startswith("tilewise_")]
    found = {ordered(line.rsplit(" ", 1)[0]): float(line.rsplit(" ", 1)[1]) for line in lines}
    assert len(found) == len(lines), text
    return found


def ordered(sample):
    name, _, labels = sample.partition("{")
    return f"{name}{{{','.join(sorted(labels.strip('}').split(',')))}}}"


def expected(rank, steps):
    own = f'engine="0",rank="{rank}"'
    versions = 'version="1.0",vllm="2",torch="3",triton="4"'
    found = {
        f'tilewise_steps_total{{{own},path="decode"}}': steps,
        f'tilewise_kernel_launches_total{{{own},kernel="decode"}}': 3 * steps,
        f'tilewise_workspace_bytes{{{own}}}': 1000,
        f'tilewise_build_info{{{own},{versions}}}': 1,
        f'tilewise_build_seconds_count{{{own}}}': 3,
        f'tilewise_build_seconds_sum{{{own}}}': pytest.approx(5.00101),
        f'tilewise_build_seconds_bucket{{{own},le="2e-05"}}': 1,
        f'tilewise_build_seconds_bucket{{{own},le="0.001"}}': 2,
        f'tilewise_build_seconds_bucket{{{own},le="+Inf"}}': 3,
    }  # fmt: skip
    return {ordered(name): value for name, value in found.items()}


@pytest.mark.parametrize("variable", [exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE])
def test_counters_of_two_workers_are_served(variable, tmp_path):
    environ = {variable: str(tmp_path)}
    for rank, steps in (("0", "5"), ("1", "7")):
        run(WORKER, rank, steps, **environ)
    text = run(READER, **environ).stdout
    found = samples(text)
    wanted = expected("0", 5) | expected("1", 7)
    assert {name: found.get(name) for name in wanted} == wanted, text
    assert text.count("# TYPE tilewise_steps_total counter") == 1


def test_a_restarted_worker_replaces_its_predecessor(tmp_path):
    environ = {exporter.FOLDER_VARIABLE: str(tmp_path)}
    run(WORKER, "0", "5", **environ)
    run(WORKER, "0", "2", **environ)
    found = samples(run(READER, **environ).stdout)
    (value,) = [v for k, v in found.items() if k.startswith("tilewise_steps_total")]
    assert value == 2


def gauges(text):
    return {k: v for k, v in samples(text).items() if "workspace" in k or "build_info" in k}


@pytest.mark.parametrize("variable", [exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE])
def test_gauges_of_a_killed_worker_are_those_of_the_next(variable, tmp_path):
    environ = {variable: str(tmp_path)}
    run(KILLED, "0", "5", "0.9", rc=-signal.SIGKILL, **environ)
    killed = gauges(run(READER, **environ).stdout)
    assert sorted(killed.values()) == [1, 1000]  # until there is a next one
    run(KILLED, "0", "2", rc=-signal.SIGKILL, **environ)
    run(WORKER, "0", "3", **environ)
    text = run(READER, **environ).stdout
    # Neither added up nor, with the labels of another version, left behind.
    wanted = {k: v for k, v in expected("0", 0).items() if "workspace" in k or "build_info" in k}
    assert gauges(text) == wanted
    # What processes counted adds up where prometheus_client merges them.
    steps = 10 if variable == exporter.NATIVE_VARIABLE else 3
    assert samples(text)['tilewise_steps_total{engine="0",path="decode",rank="0"}'] == steps


def test_native_gauges_of_ranks_that_a_restarted_server_no_longer_has_are_gone(tmp_path):
    environ = {exporter.NATIVE_VARIABLE: str(tmp_path)}
    for rank in ("0", "1"):
        run(KILLED, rank, "5", rc=-signal.SIGKILL, **environ)
    theirs = tmp_path / "gauge_livesum_7.db"
    theirs.touch()
    code = "import os; from tilewise import exporter; del os.environ[exporter.SINCE_VARIABLE]; "
    run(code + "exporter.prepare()", **environ)
    theirs.unlink()
    run(WORKER, "0", "2", **environ)
    text = run(READER, **environ).stdout
    assert len(gauges(text)) == 2
    assert not [name for name in gauges(text) if 'rank="1"' in name]
    assert samples(text)['tilewise_steps_total{engine="0",path="decode",rank="1"}'] == 5


def test_native_files_stand_beside_those_of_other_metrics_of_the_process(tmp_path):
    """prometheus_client maps theirs, and does not look whether somebody else writes there."""
    code = """
        from prometheus_client import Counter
        theirs = Counter("theirs", "Another metric.")
        theirs.inc()
    """
    after = """
        exporter.flush()
        theirs.inc(2)
        exporter.flush()
    """
    environ = {exporter.NATIVE_VARIABLE: str(tmp_path)}
    run("".join(map(textwrap.dedent, (code, WORKER, after))), "0", "5", **environ)
    text = run(READER, **environ).stdout
    assert samples(text)['tilewise_steps_total{engine="0",path="decode",rank="0"}'] == 5
    assert "theirs_total 3.0" in text


def test_ranks_that_a_restarted_server_no_longer_has_are_gone(tmp_path):
    environ = {exporter.FOLDER_VARIABLE: str(tmp_path)}
    for rank in ("0", "1"):
        run(WORKER, rank, "5", **environ)
    for path in tmp_path.glob("*.json"):
        os.utime(path, (time.time() - 60,) * 2)
    began = time.time()
    run(WORKER, "0", "2", **environ)
    found = samples(run(READER, **environ, **{exporter.SINCE_VARIABLE: str(began)}).stdout)
    assert found['tilewise_steps_total{engine="0",path="decode",rank="0"}'] == 2
    assert not [name for name in found if 'rank="1"' in name]


def test_children_belong_to_the_server_that_began_first(tmp_path):
    code = """
        import os, subprocess, sys
        from tilewise import exporter
        del os.environ[exporter.SINCE_VARIABLE]
        exporter.prepare()
        print(os.environ[exporter.SINCE_VARIABLE])
        show = "import os; from tilewise import exporter; exporter.prepare(); "
        show += "print(os.environ[exporter.SINCE_VARIABLE])"
        subprocess.run([sys.executable, "-c", show], check=True)
    """
    before = time.time()
    first, second = run(code, **{exporter.FOLDER_VARIABLE: str(tmp_path)}).stdout.split()
    assert before <= float(first) <= time.time()
    assert first == second


def test_a_folder_does_not_grow_with_every_restart(tmp_path):
    names = ["7.json", "8.part", "9.json", "theirs.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
        if name != "9.json":
            os.utime(tmp_path / name, (time.time() - 2 * exporter.ABANDONED_SECONDS,) * 2)
    code = "import os; from tilewise import exporter; del os.environ[exporter.SINCE_VARIABLE]; "
    run(code + "exporter.prepare()", **{exporter.FOLDER_VARIABLE: str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["9.json", "theirs.json"]


@pytest.mark.parametrize(
    "folder",
    ["maybe", "-1", "/proc/no/such", "/dev/null", "\udcff\udcfe", "x" * 5000, "x/" * 3000],
    ids=lambda text: ascii(text[:12]),
)
def test_text_that_names_no_folder_costs_the_values_only(folder, tmp_path):
    environ = {exporter.FOLDER_VARIABLE: folder}
    worker = run(WORKER, "0", "5", **environ)
    assert worker.stderr.count("metrics cannot be written") == 1
    # The first process of a server also looks for what others left there.
    first = READER.replace("import os", "import os; os.environ.pop('_TILEWISE_METRICS_SINCE')", 1)
    reader = run(first, **environ)
    assert samples(reader.stdout) == {}
    assert "python_info" in reader.stdout


@pytest.mark.parametrize("since", ["soon", "", "nan"])
def test_a_start_that_cannot_be_read_hides_nothing(tmp_path, since):
    environ = {exporter.FOLDER_VARIABLE: str(tmp_path), exporter.SINCE_VARIABLE: since}
    run(WORKER, "0", "5", **environ)
    assert (
        'tilewise_steps_total{engine="0",path="decode",rank="0"}' in run(READER, **environ).stdout
    )


@pytest.mark.parametrize("variable", [exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE])
def test_a_folder_that_is_gone_breaks_nothing(variable, tmp_path):
    code = """
        import logging, os, shutil, sys
        logging.basicConfig()
        from tilewise import counters, exporter
        shutil.rmtree(sys.argv[1])
        exporter.start({"engine": "0", "rank": "0"})
        for _ in range(3):
            counters.add("steps", path="decode")
            exporter.flush()
        print("served", counters.snapshot())
    """
    folder = tmp_path / "metrics"
    folder.mkdir()
    done = run(code, str(folder), **{variable: str(folder)})
    assert "served {'steps{path=decode}': 3}" in done.stdout
    assert done.stderr.count("metrics cannot be written") == 1


DISK = """
    import pathlib, sys
    filler = pathlib.Path(sys.argv[1], "filler")

    def fill():
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def drain():
        filler.unlink()
"""
LIMIT = """
    import resource

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    def drain():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
"""
FULL = """
    import logging, os, sys
    logging.basicConfig()
    from tilewise import counters, exporter
    folder, how = sys.argv[1:]

    def put():
        counters.add("steps", path="decode")
        counters.observe("build_seconds", 1e-3)
        exporter.flush()

    exporter.PERIOD_SECONDS = 1000  # the thread writes once; then it is ours to say when
    if how == "from the start":
        fill()
    exporter.start({"engine": "0", "rank": "0"})
    put()
    if how == "later":
        fill()
    for _ in range(40):
        put()
    print("served", counters.snapshot())
    files = sorted(os.listdir(folder))
    assert not [name for name in files if name.endswith(".part")], files
    drain()
    put()
"""
# A file system of its own for one process and its children, gone with them.
MOUNTED = [
    "unshare", "--map-root-user", "--mount", "sh", "-c",
    'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"', "sh",
]  # fmt: skip


@pytest.fixture(params=["disk", "limit"])
def room(request, tmp_path):
    """A prefix for a command, under which little fits into the folder, and code to use it up."""
    if request.param == "limit":
        return [], LIMIT
    prefix = [*MOUNTED, str(tmp_path)]
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be mounted: {error}")
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted: {tried.stderr.strip()}")
    return prefix, DISK


@pytest.mark.parametrize("how", ["from the start", "later"])
@pytest.mark.parametrize("variable", [exporter.FOLDER_VARIABLE, exporter.NATIVE_VARIABLE])
def test_a_full_disk_is_said_once_and_kills_nobody(variable, how, room, tmp_path):
    """Where files are mapped, a page without a block is a SIGBUS and the end of the engine."""
    prefix, code = room
    code = "".join(map(textwrap.dedent, (code, FULL, READER)))
    done = run(code, str(tmp_path), how, prefix=prefix, **{variable: str(tmp_path)})
    assert "served {'steps{path=decode}': 41}" in done.stdout
    assert done.stderr.count("metrics cannot be written") == 1, done.stderr
    # What was counted meanwhile is there once there is room.
    found = samples(done.stdout)
    assert found['tilewise_steps_total{engine="0",path="decode",rank="0"}'] == 42
    assert found['tilewise_build_seconds_count{engine="0",rank="0"}'] == 42


def test_a_process_that_ends_does_not_miss_the_folder_it_removed():
    """With the engine in the server's own process, the exporter's thread outlives the folder."""
    code = """
        import atexit, logging, os, time
        logging.basicConfig()
        from tilewise import counters, exporter
        exporter.PERIOD_SECONDS = 0.01
        atexit.register(time.sleep, 0.3)  # runs last
        exporter.prepare()
        exporter.start({"engine": "0", "rank": "0"})
        counters.add("steps", path="decode")
        exporter.flush()
        print(os.listdir(os.environ[exporter.FOLDER_VARIABLE]))
    """
    done = run(code)
    assert ".json" in done.stdout
    assert "cannot be written" not in done.stderr


def test_a_forked_child_ends_and_exports_nothing():
    """It inherits what runs at its parent's end, and a lock whose thread it does not have."""
    code = """
        import os, sys
        from tilewise import exporter
        exporter.prepare()
        exporter.start({"engine": "0", "rank": "0"})
        exporter.flush()
        with exporter._exporters[os.getpid()]._lock:  # as the thread has it while it writes
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
        folder = os.environ[exporter.FOLDER_VARIABLE]
        print([name for name in os.listdir(folder) if name.startswith(f"{child}.")])
    """
    assert run(code).stdout.strip() == "[]"


def test_the_first_process_makes_the_folder_and_removes_it():
    code = """
        import os, subprocess, sys
        from tilewise import exporter
        exporter.prepare(); exporter.prepare()
        folder = os.environ[exporter.FOLDER_VARIABLE]
        child = [sys.executable, "-c", "from tilewise import exporter; exporter.prepare()"]
        subprocess.run(child, check=True)
        print(folder, os.path.isdir(folder))
    """
    folder, was_there = run(code).stdout.split()
    assert was_there == "True"
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "null", '{"labels": {"engine": "0"}, "totals": [], "histograms": {}}',
        '{"labels": 5, "totals": [], "histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [7], "histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [["of_tomorrow", {}, 1]], '
        '"histograms": {}}',
        # Metrics that another version had with other labels, values or buckets.
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [["steps", {}, 1]], "histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [["steps", {"path": "decode"}, "1"]], '
        '"histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [["build_seconds", {}, 1]], '
        '"histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [[["steps"], {}, 1]], '
        '"histograms": {}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [], "histograms": {"kv_splits": [1]}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [], "histograms": {"kv_splits": 1}}',
        '{"labels": {"engine": "0", "rank": "9"}, "totals": [["steps", {"path": 7}, 1]], '
        '"histograms": {}}',
        '{"labels": {"engine": 0, "rank": ["9"]}, "totals": [], "histograms": {}}',
    ],
)  # fmt: skip
def test_files_of_others_are_left_out_and_named(tmp_path, content):
    run(WORKER, "0", "5", **{exporter.FOLDER_VARIABLE: str(tmp_path)})
    (tmp_path / "theirs.json").write_text(content)
    done = run(READER, **{exporter.FOLDER_VARIABLE: str(tmp_path)})
    assert samples(done.stdout)['tilewise_steps_total{engine="0",path="decode",rank="0"}'] == 5
    assert 'rank="9"' not in done.stdout
    assert "theirs.json out of the metrics" in done.stderr


def test_half_written_files_are_never_read(tmp_path, monkeypatch):
    monkeypatch.setenv(exporter.FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "12.part").write_text('{"pid": 12, "lab')
    sink = exporter.FileSink(tmp_path, {"engine": "0", "rank": "0"})
    sink.write([("steps", (("path", "mixed"),), 4)], [])
    families = {family.name: family for family in exporter.FolderCollector().collect()}
    (sample,) = families["tilewise_steps"].samples
    # Histograms are there before anything was observed, so that `rate` sees the first values.
    assert {s.value for s in families["tilewise_build_seconds"].samples} == {0}
    assert (sample.name, sample.value) == ("tilewise_steps_total", 4)
    assert sample.labels == {"engine": "0", "rank": "0", "path": "mixed"}


def test_nothing_grows_without_an_exporter():
    counters.reset()
    for i in range(30_000):
        counters.observe("build_seconds", i)
    assert len(counters.drain()) == 10_000
    assert counters.drain() == []


def test_every_metric_is_described():
    for name, metric in counters.METRICS.items():
        assert metric.name.startswith("tilewise_"), name
        assert metric.kind in ("counter", "gauge", "histogram")
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
    json.dumps([m.name for m in counters.METRICS.values()])


SIDE = """
    import json, os, subprocess, sys, urllib.request
    from tilewise import exporter
    exporter.prepare()
    exporter.prepare()
    worker = sys.argv[1]
    for rank in ("0", "1"):
        subprocess.run([sys.executable, "-c", worker, rank, "5"], check=True)
    child = [sys.executable, "-c", "from tilewise import exporter; exporter.prepare()"]
    done = subprocess.run(child, check=True, capture_output=True, text=True)
    where = os.environ["TILEWISE_METRICS_PORT"]
    url = f"http://{where if ':' in where else '127.0.0.1:' + where}/metrics"
    print(urllib.request.urlopen(url, timeout=10).read().decode())
    print("child said", repr(done.stderr))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("host", ["", "127.0.0.1:"])
def test_a_side_port_shows_all_workers_and_nothing_else(native, host, tmp_path):
    environ = {"TILEWISE_METRICS_PORT": host + free_port()}
    if native:
        environ[exporter.NATIVE_VARIABLE] = str(tmp_path)
    text = run(SIDE, textwrap.dedent(WORKER), **environ).stdout
    found = samples(text)
    steps = {k: v for k, v in found.items() if k.startswith("tilewise_steps_total")}
    assert sorted(steps.values()) == [5, 5]
    assert {line.split("{")[0] for line in text.splitlines() if "{" in line} == {
        k.split("{")[0] for k in found
    }
    # A child knows who listens, and does not try.
    assert "child said ''" in text


def test_a_side_port_that_is_taken_costs_nothing_else(tmp_path):
    code = """
        import logging
        logging.basicConfig()
        from tilewise import exporter
        exporter.prepare()
        from prometheus_client import REGISTRY
        print(type(REGISTRY._collector_to_names).__name__)
    """
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = run(code, TILEWISE_METRICS_PORT=port)
    assert f"no metrics on 127.0.0.1:{port}" in done.stderr
    assert done.stdout == "dict\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", "off"), ("OFF", "off"), ("9091", "127.0.0.1:9091"), ("0.0.0.0:1", "0.0.0.0:1")],
)
def test_side_ports_that_can_be_read(text, value):
    assert side_port.parse("TILEWISE_METRICS_PORT", text) == value


@pytest.mark.parametrize("text", ["0", "65536", "-1", "x", "host:", "1_0", "٣", "9091/metrics"])
def test_side_ports_that_cannot_be_read_are_named(text):
    with pytest.raises(UnsupportedConfig, match="use off, a port from 1 to 65535") as raised:
        side_port.parse("TILEWISE_METRICS_PORT", text)
    assert repr(text) in str(raised.value)
