"""What ``precaudit audit`` prints beside its verdicts."""

import json

from precaudit.cli import run

SETTINGS = 'subject = "tiny"\nprompts = "p.jsonl"\npoints = "v,logits"\nphases = "prefill"\nformula = false\n'


def test_an_audit_that_passes_says_where_its_run_is(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precaudit.toml").write_text(SETTINGS)
    (tmp_path / "p.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    assert run(["audit"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("✓ ")
    assert said[-1] == "Run: traces/runs/audit; report: traces/runs/audit/report.md"
    assert (tmp_path / "traces" / "runs" / "audit" / "report.md").is_file()
    assert run(["audit", "--json"]) == 0
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == []
