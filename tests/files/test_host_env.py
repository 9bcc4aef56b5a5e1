"""The host-side builder, with tiny wheels from an index on this machine."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wheelhouse import SCRIPT, Bench, serving, site

from bringup import paths


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with serving() as index:
        yield Bench(tmp_path, index)


def marker(env: Path) -> dict[str, object]:
    return dict(json.loads((env / ".bringup-env.json").read_text()))


def test_reads_under_python_3_8() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_a_build_ends_with_the_marker_and_the_fingerprints_that_the_probe_computes(bench: Bench) -> None:
    order = bench.order(
        {"torch": [bench.index.add("torch", "2.9.1+cu130")], "kernel": [bench.index.add("sgl-kernel", "0.3.21")]}
    )
    env = bench.build(order)
    probe = paths.host_script("host_probe")
    versions, prints, unlike, strays = probe.inspect_site(str(site(env)), True)
    written = marker(env)
    assert {key: written[key] for key in ("schema", "digest", "generation", "python", "platform")} == {
        "schema": 1,
        "digest": "abcdefabcdef",
        "generation": 1,
        "python": order["python"],
        "platform": order["platform"],
    }
    assert written["distributions"] == versions == {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21"}
    assert written["files_fingerprint"] == prints
    assert (unlike, strays) == ({}, [])


def test_every_user_can_read_it_although_root_has_umask_077(bench: Bench) -> None:
    env = bench.build(bench.order({"one": [bench.index.add("one", "1")]}))
    closed = [
        str(path)
        for path in [bench.home, bench.home / "envs", env, *env.rglob("*")]
        if not path.is_symlink()
        and (stat.S_IMODE(path.stat().st_mode) & (0o555 if path.is_dir() else 0o444))
        != (0o555 if path.is_dir() else 0o444)
    ]
    assert closed == []
    assert stat.S_IMODE((bench.home / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE((bench.root / "jit" / "abcdefabcdef").stat().st_mode) == 0o1777


def test_a_second_environment_shares_inodes_with_the_first(bench: Bench) -> None:
    files = {"one": [bench.index.add("one", "1")]}
    first = bench.build(bench.order(files))
    second = bench.build(bench.order(files, generation=2))
    assert (site(first) / "one.py").stat().st_ino == (site(second) / "one.py").stat().st_ino


def test_a_step_tells_what_it_added(bench: Bench) -> None:
    order = bench.order({"a": [bench.index.add("one", "1"), bench.index.add("two", "2")]})
    bench.run(order, "create")
    bench.run(order, "install", "a")
    seen = bench.last("install")
    assert (seen["added"], seen["changed"], seen["removed"], seen["unlike"], seen["foreign"]) == (
        {"one": "1", "two": "2"},
        {},
        [],
        {},
        [],
    )
    assert [call["status"] for call in seen["calls"]] == [0]


def test_a_step_that_replaces_an_earlier_distribution_tells_both_versions(bench: Bench) -> None:
    order = bench.order(
        {"torch": [bench.index.add("torch", "2.9.1+cu130")], "other": [bench.index.add("torch", "2.9.1+cu128")]}
    )
    bench.run(order, "create")
    bench.run(order, "install", "torch")
    bench.run(order, "install", "other")
    assert bench.last("install")["changed"] == {"torch": {"was": "2.9.1+cu130", "is": "2.9.1+cu128", "files": []}}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        pytest.param("", [], id="same bytes are no change"),
        pytest.param("different = True\n", ["nvidia/__init__.py"], id="other bytes are a change"),
    ],
)
def test_a_file_that_two_distributions_share(bench: Bench, text: str, changed: list[str]) -> None:
    order = bench.order(
        {
            "a": [bench.index.add("nvidia-a", "1", {"nvidia/__init__.py": "", "nvidia/a.py": ""})],
            "b": [bench.index.add("nvidia-b", "1", {"nvidia/__init__.py": text, "nvidia/b.py": ""})],
        }
    )
    bench.run(order, "create")
    bench.run(order, "install", "a")
    bench.run(order, "install", "b")
    seen = bench.last("install")["changed"]
    assert [file["path"] for file in seen.get("nvidia-a", {"files": []})["files"]] == changed


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param("hash", "Hash mismatch", id="wrong hash"),
        pytest.param("absent", "not found in the package registry", id="not in the index"),
        pytest.param("down", "503", id="index down"),
    ],
)
def test_a_failing_step_is_a_report_and_leaves_no_marker(bench: Bench, spoil: str, said: str) -> None:
    file = bench.index.add("one", "1")
    if spoil == "hash":
        file = {**file, "sha256": "0" * 64}
    if spoil == "absent":
        bench.index.files.clear()
    bench.index.is_down = spoil == "down"
    order = bench.order({"a": [file]})
    bench.run(order, "create")
    bench.run(order, "install", "a")
    call = bench.last("install")["calls"][-1]
    assert call["status"] != 0
    assert said in call["output"]
    assert bench.last("install")["added"] == {}
    assert not (Path(order["env"]) / ".bringup-env.json").exists()


def test_a_wheel_that_came_after_the_page_was_read_is_found(bench: Bench) -> None:
    # uv takes the page out of its cache for ten minutes, and would not find the second wheel on it.
    bench.build(bench.order({"a": [bench.index.add("one", "1")]}))
    bench.build(bench.order({"a": [bench.index.add("one", "2")]}, generation=2))
    assert next(entry for entry in bench.log["actions"] if entry["action"] == "install")["added"] == {"one": "2"}


def test_credentials_reach_the_index_and_leave_nothing_behind(bench: Bench) -> None:
    bench.index.login = ("robot", "s3cret-word")
    order = bench.order({"a": [bench.index.add("one", "1")]})
    bench.run(order, "create")
    (bench.run_dir / "credentials").write_text(json.dumps({"one": {"user": "robot", "password": "s3cret-word"}}))
    bench.run(order, "install", "a")
    assert bench.last("install")["added"] == {"one": "1"}
    bench.run(order, "finish")
    secret = subprocess.run(["grep", "-rl", "s3cret-word", bench.root], capture_output=True, text=True, check=False)
    assert secret.stdout == ""


def test_without_credentials_a_closed_index_is_a_report(bench: Bench) -> None:
    bench.index.login = ("robot", "s3cret-word")
    order = bench.order({"a": [bench.index.add("one", "1")]})
    bench.run(order, "create")
    bench.run(order, "install", "a")
    assert "401" in bench.last("install")["calls"][-1]["output"]


def test_an_edit_in_one_environment_does_not_come_back_in_the_next(bench: Bench) -> None:
    files = {"one": [bench.index.add("one", "1")], "two": [bench.index.add("two", "2")]}
    first = bench.build(bench.order(files))
    with (site(first) / "one.py").open("a") as file:
        file.write("edited = True\n")
    second = bench.build(bench.order(files, generation=2))
    install = next(entry for entry in bench.log["actions"] if entry.get("step") == "one")
    assert install["healed"] == ["one"]
    assert install["unlike"] == {}
    assert install["tainted"] == ["abcdefabcdef-1"]
    assert "edited" not in (site(second) / "one.py").read_text()
    assert (first / ".bringup-tainted").exists()
    assert not (second / ".bringup-tainted").exists()


def test_heal_evicts_what_differs_and_taints_all_that_share_it(bench: Bench) -> None:
    files = {"one": [bench.index.add("one", "1")], "two": [bench.index.add("two", "2")]}
    first = bench.build(bench.order(files))
    second = bench.build(bench.order(files, generation=2))
    apart = bench.build(bench.order({"two": files["two"]}, digest="bbbbbbbbbbbb"))
    with (site(second) / "one.py").open("a") as file:
        file.write("edited = True\n")
    order = bench.order(files, generation=3)
    bench.run(order, "heal", str(second))
    seen = bench.last("heal")
    assert sorted(seen["unlike"]) == ["one"]
    assert seen["tainted"] == ["abcdefabcdef-1", "abcdefabcdef-2"]
    assert [env.name for env in (first, second, apart) if (env / ".bringup-tainted").exists()] == [
        first.name,
        second.name,
    ]


def test_create_removes_what_was_never_finished_and_nothing_else(bench: Bench) -> None:
    files = {"one": [bench.index.add("one", "1")]}
    done = bench.build(bench.order(files))
    broken_off = bench.order(files, generation=2)
    bench.run(broken_off, "create")
    bench.run(broken_off, "install", "one")
    bench.run(bench.order(files, generation=2), "create")
    assert bench.last("create")["swept"] == ["abcdefabcdef-2"]
    assert [path.name for path in sorted((bench.home / "envs").iterdir())] == ["abcdefabcdef-1", "abcdefabcdef-2"]
    assert marker(done)["generation"] == 1


def test_a_complete_environment_is_never_built_over(bench: Bench) -> None:
    order = bench.order({"one": [bench.index.add("one", "1")]})
    env = bench.build(order)
    before = (env / ".bringup-env.json").read_bytes()
    assert "complete" in bench.run(order, "create", status=1)
    assert "not being built" in bench.run(order, "install", "one", status=1)
    assert (env / ".bringup-env.json").read_bytes() == before


def test_no_interpreter_of_the_minor_is_a_report(bench: Bench) -> None:
    bench.run(bench.order({}, python="3.99"), "create")
    assert (bench.last("create")["status"], bench.last("create")["interpreter"]) == (1, None)


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        pytest.param("value = 1\n", 0, "", id="good"),
        pytest.param("import no_such_module\n", 1, "No module named 'no_such_module'", id="missing"),
        pytest.param("import os\nassert not os.environ.get('PATH'), 'PATH'\n", 0, "", id="empty environment"),
        pytest.param("import os\nos.kill(os.getpid(), 6)\n", 134, "", id="killed by a signal"),
    ],
)
def test_imports_in_a_fresh_process(bench: Bench, text: str, status: int, said: str) -> None:
    order = bench.order({"a": [bench.index.add("one", "1", {"one.py": text})]}, imports={"a": ["one"]})
    bench.run(order, "create")
    bench.run(order, "install", "a")
    bench.run(order, "imports", "a")
    seen = bench.last("imports")["modules"]["one"]
    assert seen["status"] == status
    assert said in seen["output"]
    assert bench.last("imports")["changed"] == {}


def diff_of(path: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


OLD = "".join(f"line_{number} = {number}\n" for number in range(40))


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(OLD.replace("line_20 = 20", "line_20 = 'x'"), id="one line"),
        pytest.param("first = 0\n" + OLD + "last = 0\n", id="both ends"),
        pytest.param(OLD.replace("line_3 = 3\n", "").replace("line_30 = 30\n", ""), id="two hunks"),
        pytest.param(OLD.rstrip("\n"), id="no newline at the end"),
        pytest.param("", id="emptied"),
    ],
)
def test_a_unified_diff_gives_the_new_text(new: str) -> None:
    builder = paths.host_script("host_env")
    hunks = builder.parse_diff(diff_of("one/x.py", OLD, new))
    assert list(hunks) == ["one/x.py"]
    assert builder.patched(OLD.encode(), hunks["one/x.py"], "one/x.py").decode() == new


def test_a_patch_changes_the_file_and_its_record_but_not_the_cache(bench: Bench) -> None:
    new = OLD.replace("line_20 = 20", "line_20 = 'x'")
    files = {"a": [bench.index.add("one", "1", {"one/x.py": OLD, "one/__init__.py": ""})]}
    plain = bench.build(bench.order(files, digest="aaaaaaaaaaaa"))
    one = {
        "distribution": "one",
        "version": "1",
        "diff": diff_of("one/x.py", OLD, new),
        "files": {"one/x.py": {"before": sha(OLD), "after": sha(new)}},
    }
    env = bench.build(bench.order(files, patches=[one]))
    assert bench.last("patch")["patches"][0]["problem"] is None
    assert (site(env) / "one/x.py").read_text() == new
    assert (site(plain) / "one/x.py").read_text() == OLD
    probe = paths.host_script("host_probe")
    _, prints, unlike, strays = probe.inspect_site(str(site(env)), True)
    assert (unlike, strays) == ({}, [])
    assert marker(env)["files_fingerprint"] == prints


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"version": "2"}, "version wanted 2, found 1", id="another version"),
        pytest.param({"distribution": "two"}, "version wanted 1, found None", id="not installed"),
        pytest.param(
            {"files": {"one.py": {"before": "0" * 64, "after": "0" * 64}}}, "before the patch", id="another file"
        ),
        pytest.param(
            {"files": {"one.py": {"before": sha("a = 1\n"), "after": "0" * 64}}}, "after the patch", id="another result"
        ),
        pytest.param({"diff": diff_of("one.py", "b = 1\n", "b = 2\n")}, "line 1 is not what", id="does not fit"),
        pytest.param({"diff": diff_of("two.py", "a = 1\n", "a = 2\n")}, "does not touch one.py", id="other path"),
        pytest.param(
            {"files": {"../x": {"before": "0" * 64, "after": "0" * 64}}}, "leaves the environment", id="outside"
        ),
        pytest.param({"diff": "+++ b/one.py\n@@ -1 +1 @@\n-a = 1\n"}, "ends within a hunk", id="cut off"),
        pytest.param(
            {"diff": diff_of("one.py", "a = 1\n", "a = 2\n") + diff_of("three.py", "", "c = 1\n")},
            "without recorded hashes: three.py",
            id="one file too many",
        ),
    ],
)
def test_a_patch_that_does_not_fit_changes_nothing(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    info = tmp_path / "one-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("one.py,,\n")
    (tmp_path / "one.py").write_text("a = 1\n")
    one = {
        "distribution": "one",
        "version": "1",
        "diff": diff_of("one.py", "a = 1\n", "a = 2\n"),
        "files": {"one.py": {"before": sha("a = 1\n"), "after": sha("a = 2\n")}},
        **change,
    }
    result = paths.host_script("host_env").apply_patch("/no/environment", str(tmp_path), one)
    assert problem in result["problem"]
    assert (tmp_path / "one.py").read_text() == "a = 1\n"
    assert (info / "RECORD").read_text() == "one.py,,\n"


def test_a_wheel_whose_own_record_is_wrong_gets_a_true_one(bench: Bench) -> None:
    file = bench.index.add("one", "1", {"one.py": "a = 1\n", "two.py": ""}, spoil="one.py")
    env = bench.build(bench.order({"a": [file]}))
    install = next(entry for entry in bench.log["actions"] if entry["action"] == "install")
    assert (install["misrecorded"], install["unlike"], install["tainted"]) == ({"one": ["one.py"]}, {}, [])
    _, _, unlike, _ = paths.host_script("host_probe").inspect_site(str(site(env)), True)
    assert unlike == {}


@pytest.mark.parametrize("damage", ["nothing", "appended", "removed", "same size and time"])
def test_check_names_what_differs_from_the_marker(bench: Bench, damage: str) -> None:
    env = bench.build(bench.order({"a": [bench.index.add("one", "1"), bench.index.add("two", "2")]}))
    file = site(env) / "one.py"
    seen = file.stat()
    if damage == "appended":
        file.write_text(file.read_text() + "x = 1\n")
    elif damage == "removed":
        file.unlink()
    elif damage == "same size and time":
        file.write_text(file.read_text().replace("1", "7"))
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    found = {}
    for deep in ("", "--deep"):
        command = [sys.executable, SCRIPT, "check", env, *([deep] if deep else [])]
        found[deep] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shallow = ["one"] if damage in ("appended", "removed") else []
    assert found[""] == {"differing": shallow, "has_interpreter": True}
    assert found["--deep"] == {"differing": [] if damage == "nothing" else ["one"], "has_interpreter": True}


def test_collection_keeps_the_newest_and_what_is_in_use(bench: Bench) -> None:
    files = {"one": [bench.index.add("one", "1")]}
    envs = [bench.build(bench.order(files, generation=number)) for number in range(1, 7)]
    (bench.home / "current").symlink_to(envs[5])
    busy = subprocess.Popen([envs[1] / "bin" / "python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        command = [sys.executable, SCRIPT, "collect", bench.home, "--keep", "2", "--protect", envs[2].name]
        for _ in range(50):
            if str(envs[1]) in Path(f"/proc/{busy.pid}/cmdline").read_text():
                break
            time.sleep(0.02)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        busy.communicate(b"\n")
    left = [path.name for path in sorted((bench.home / "envs").iterdir())]
    assert left == [envs[number].name for number in (1, 2, 3, 4, 5)]
    assert f"{envs[1]} is in use: kept" in done.stdout


def test_a_builder_that_is_killed_leaves_the_lock_to_its_uv(bench: Bench) -> None:
    """The inherited lock is released only when the last child of the builder has ended."""
    import fcntl

    order = bench.order({"a": [bench.index.add("one", "1")]})
    bench.run(order, "create")
    slow = bench.root / "uv"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    (bench.run_dir / "order.json").write_text(json.dumps({**order, "uv": str(slow)}))
    lock = os.open(bench.run_dir / "work.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    builder = subprocess.Popen(
        [sys.executable, SCRIPT, "install", bench.run_dir / "order.json", "a"],
        env={"PATH": os.environ["PATH"], "BRINGUP_RUN_DIR": str(bench.run_dir)},
        pass_fds=(lock,),
        stdout=subprocess.DEVNULL,
    )
    os.close(lock)
    children: list[int] = []
    while not children:
        listed = subprocess.run(["pgrep", "-P", str(builder.pid)], capture_output=True, text=True, check=False)
        children = [int(pid) for pid in listed.stdout.split()]
    builder.kill()
    builder.wait()
    other = os.open(bench.run_dir / "work.lock", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(children[0], 9)
        fcntl.flock(other, fcntl.LOCK_EX)
    finally:
        os.close(other)


def test_look_names_uv_and_the_interpreters(bench: Bench) -> None:
    order = bench.order({})
    done = subprocess.run(
        [sys.executable, SCRIPT, "look", order["uv"], order["python"]], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert seen["uv_sha256"] == hashlib.sha256(Path(order["uv"]).read_bytes()).hexdigest()
    assert [found["version"].rpartition(".")[0] for found in seen["interpreters"]] == [order["python"]]
    missing = subprocess.run(
        [sys.executable, SCRIPT, "look", "/no/such/uv", "3.99"], capture_output=True, text=True, check=True
    )
    assert json.loads(missing.stdout)["uv_sha256"] is None
    assert json.loads(missing.stdout)["interpreters"] == []


def test_the_index_is_asked_for_nothing_but_the_locked_names(bench: Bench) -> None:
    order = bench.order({"a": [bench.index.add("one", "1"), bench.index.add("two", "2")]})
    bench.index.add("three", "3")
    bench.build(order)
    assert sorted({path for path in bench.index.asked if path.startswith("/simple")}) == [
        "/simple/one/",
        "/simple/two/",
    ]
