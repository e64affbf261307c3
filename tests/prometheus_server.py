"""A real Prometheus server (Debian's package) that scrapes one target, for tests."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

BINARY = shutil.which("prometheus")
MISSING = "needs prometheus (Debian's package of that name)"


class Prometheus:
    """Started at once; scrapes ``127.0.0.1:port`` every second until `stop`."""

    def __init__(self, folder: Path, port: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            own = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{own}"
        config = folder / "prometheus.yml"
        target = {"targets": [f"127.0.0.1:{port}"]}
        scrape = {"job_name": "vllm", "static_configs": [target]}
        content = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
        config.write_text(json.dumps(content))  # JSON is YAML
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [BINARY, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{own}"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(timeout=30)

    def is_ready(self) -> bool:
        """Whether the server answers queries: it listens before its database is open."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=30) as reply:
                return reply.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, path: str, **arguments: str) -> object:
        """Return the data of an API call that must succeed."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str, at: float) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every sample of an instant query."""
        data = self.ask("query", query=expression, time=f"{at:.3f}")
        assert data["resultType"] == "vector", data
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]

    def wait_for(self, expression: str, value: float, seconds: float = 60.0) -> None:
        """Wait until the sum of an expression has a value."""
        deadline = time.monotonic() + seconds
        found: object = "asked of a server that is not ready"
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            if self.is_ready():
                found = self.query(f"sum({expression})", time.time())
                if [v for _, v in found] == [value]:
                    return
            time.sleep(0.25)
        raise AssertionError(f"sum({expression}) is {found}, not {value}")
