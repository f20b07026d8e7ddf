"""A real object store in one process for tests: SeaweedFS, on free ports, ended by its own process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY, SECRET, BUCKET = "everstep-key", "everstep-secret", "ckpt"


@dataclass(frozen=True)
class Server:
    endpoint: str
    pid: int

    @property
    def options(self) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}


def free_ports(count: int) -> list[int]:
    # SeaweedFS uses each port + 10000 as well, so the ports must be small.
    found: list[int] = []
    candidate = 12000 + os.getpid() * 40 % 8000  # far from those of a server that starts at the same moment
    while len(found) < count:
        candidate += 1
        try:
            with ExitStack() as held:
                for port in (candidate, candidate + 10000):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        found.append(candidate)
    return found


@contextmanager
def s3_server(folder: Path, deadline_s: float = 30) -> Iterator[Server]:
    s3, master, volume, filer, admin = free_ports(5)
    command = [str(Path(sys.executable).parent / "weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1"]
    command += [
        "-ip.bind=127.0.0.1",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-admin.port={admin}",
        f"-master.port={master}",
    ]
    command += [f"-volume.port={volume}", f"-filer.port={filer}", "-admin.ui=false", "-webdav=false"]
    command += ["-bucket", BUCKET]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    log = folder / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
    try:
        _await_bucket(f"http://127.0.0.1:{s3}", process, log, time.monotonic() + deadline_s)
        yield Server(f"http://127.0.0.1:{s3}", process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _await_bucket(endpoint: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    import botocore.session
    from botocore.config import Config

    config = Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 1})
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=config,
    )
    while True:
        try:
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"?")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no object store: {log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.1)  # a foreign server announces its readiness in no other way
