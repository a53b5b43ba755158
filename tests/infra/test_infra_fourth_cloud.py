"""A new cloud needs only a folder, and the contract test covers it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import infra_fourth
from provider_mocks.recording import ROOT


def test_the_contract_test_covers_clouds_in_other_folders_and_finds_their_mistakes(tmp_path: Path) -> None:
    infra_fourth.write(tmp_path, "fourth")
    infra_fourth.write(tmp_path, "careless", kubeconfig='pulumi.Output.from_input("{}")')
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "tests/infra/test_infra_contract.py",
    ]
    environment = {**os.environ, "TORCHREC_CLOUD_FOLDERS": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    of_fourth = [line for line in lines if "[fourth]" in line and line.startswith(("PASSED", "FAILED", "ERROR"))]
    assert len(of_fourth) >= 10, run.stdout[-3000:]
    assert all(line.startswith("PASSED") for line in of_fourth), "\n".join(of_fourth)
    secret = [
        line for line in lines if "test_the_kubeconfig_is_a_secret[careless]" in line and line.startswith("FAILED")
    ]
    assert secret, "a kubeconfig in plain text must fail the contract test"
