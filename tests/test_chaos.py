"""The killer of workers finds their processes, and no other process."""

import json
import subprocess
import sys
import time

from chaos.processes import workers


def test_another_process_with_a_dead_workers_number_is_no_worker(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:

        def found(seconds):
            row = {"time": time.time() + seconds, "worker": "trainer", "process": process.pid}
            (tmp_path / "workers.jsonl").write_text(json.dumps(row) + "\n")
            return workers(tmp_path)

        assert found(0) == {"trainer": process.pid}
        assert found(-10) == {}  # it began after the row was written
        process.kill()
        process.wait()
        assert found(0) == {}
