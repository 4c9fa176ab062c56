"""Every way a recipe can be wrong gives one line that names the key, what was given and what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fsdp_ciera.cli.main import main
from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Ciera, Data, Model, Optimizer, Recipe, Train, load_recipe

MINIMAL = '[model]\nfolder = "m"\n[data]\nfiles = "*.txt"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_minimal_recipe_has_documented_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe == Recipe(model=Model(folder="m"), data=Data(files=("*.txt",)))
    assert recipe.ciera == Ciera(policy="default")
    assert recipe.parallel.param_dtype == "bfloat16" and recipe.parallel.reduce_dtype == "float32"


def test_every_field_is_documented() -> None:
    """The string under a field is its documentation; it is in the source, so that is where it is looked for."""
    import ast
    import inspect

    from fsdp_ciera.recipes import config

    undocumented = []
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef) and node.name != "Recipe":
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and not is_documented:
                    undocumented.append(f"{node.name}.{ast.unparse(field.target)}")
    assert undocumented == []


def test_values_are_converted(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(
            tmp_path, MINIMAL + 'eval_fraction = 0\n[optimizer]\nlr = 1\nbetas = [0, 0.5]\n[ciera]\ncodecs = ["raw"]\n'
        )
    )
    assert recipe.optimizer.lr == 1.0 and isinstance(recipe.optimizer.lr, float)
    assert recipe.optimizer.betas == (0.0, 0.5)
    assert recipe.ciera.codecs == ("raw",)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=7", "train", "steps", 7),
        ("optimizer.lr = 2e-4", "optimizer", "lr", 2e-4),
        ("ciera.policy=none", "ciera", "policy", "none"),
        ('ciera.policy="paper"', "ciera", "policy", "paper"),
        ("ciera.cache_budget=8GiB", "ciera", "cache_budget", "8GiB"),
        ("ciera.cache_budget=1024", "ciera", "cache_budget", 1024),
        ("ciera.verify=every", "ciera", "verify", "every"),
        ("ciera.verify=3", "ciera", "verify", 3),
        ("ciera.categories=['embedding', 'expert_ffn']", "ciera", "categories", ("embedding", "expert_ffn")),
        ("parallel.reshard_after_forward=false", "parallel", "reshard_after_forward", False),
        ("parallel.reshard_after_forward=4", "parallel", "reshard_after_forward", 4),
        ("parallel.reshard_root_after_forward=true", "parallel", "reshard_root_after_forward", True),
        ("model.folder=/a b/c=d", "model", "folder", "/a b/c=d"),
        ("data.files=['a.txt', 'b/**/*.jsonl']", "data", "files", ("a.txt", "b/**/*.jsonl")),
        ("checkpoint.resume=latest", "checkpoint", "resume", "latest"),
    ],
)
def test_override(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL), ["train.steps=3", override])
    got = getattr(getattr(recipe, section), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.step=3", "train.step is not a key (did you mean 'steps'?); allowed in [train]: steps, "
         "micro_batch_size, gradient_accumulation, activation_checkpointing, eval_every, eval_batches, seed, "
         "deterministic, output"),
        ("optimizer.zzz=3", "optimizer.zzz is not a key; allowed in [optimizer]: lr, betas, eps, weight_decay, "
         "max_grad_norm"),
        ("optimiser.lr=3", "[optimiser] is not a section (did you mean 'optimizer'?); allowed: model, data, optimizer, "
         "schedule, train, parallel, ciera, checkpoint, metrics"),
        ("train.steps=ten", 'train.steps: got "ten", allowed: an integer of at least 1'),
        ("train.steps=0", "train.steps: got 0, allowed: an integer of at least 1"),
        ("train.steps=1.5", "train.steps: got 1.5, allowed: an integer of at least 1"),
        ("train.steps=true", "train.steps: got true, allowed: an integer of at least 1"),
        ("train.seed=-1", "train.seed: got -1, allowed: an integer of at least 0 and at most 4294967295"),
        ("train.deterministic=1", "train.deterministic: got 1, allowed: true or false"),
        ("optimizer.lr=0", "optimizer.lr: got 0, allowed: a number above 0"),
        ("optimizer.lr=nan", "optimizer.lr: got nan, allowed: a number above 0"),
        ("optimizer.lr=fast", 'optimizer.lr: got "fast", allowed: a number above 0'),
        ("optimizer.betas=[0.9]", "optimizer.betas: got [0.9], allowed: a list of 2, each a number of at least 0 and "
         "at most 1"),
        ("optimizer.betas=[0.9, 2]", "optimizer.betas: got [0.9, 2], allowed: a list of 2, each a number of at least 0 "
         "and at most 1"),
        ("data.eval_fraction=1", "data.eval_fraction: got 1, allowed: a number of at least 0 and at most 0.9"),
        ("data.files=[1]", "data.files: got [1], allowed: a list, each a non-empty string"),
        ("data.files=[]", "data.files: got [], allowed: at least one path or glob"),
        ("model.folder=''", 'model.folder: got "", allowed: a non-empty string'),
        ("model.folder=3", "model.folder: got 3, allowed: a non-empty string"),
        ("model.attention=flash", 'model.attention: got "flash", allowed: one of "sdpa", "eager"'),
        ("ciera.policy=fast", 'ciera.policy: got "fast", allowed: one of "default", "paper", "none"'),
        ("ciera.policy=1", 'ciera.policy: got 1, allowed: one of "default", "paper", "none"'),
        ("data.shuffle=2020-01-01", "data.shuffle: got 2020-01-01, allowed: true or false"),
        ("parallel.reshard_after_forward=1", "parallel.reshard_after_forward: got 1, allowed: true or false or an "
         "integer of at least 2"),
        ("schedule.warmup_steps=101", "schedule.warmup_steps: got 101, allowed: at most train.steps = 100"),
        ("train.eval_every=5", "train.eval_every: got 5, allowed: 0 as long as data.eval_fraction is 0"),
        ("train.steps", '--set: got "train.steps", allowed: section.key=value'),
        ("steps=3", '--set: got "steps=3", allowed: section.key=value'),
        ("model={}", '--set: got "model={}", allowed: section.key=value'),
    ],
)  # fmt: skip
def test_wrong_value(tmp_path: Path, override: str, line: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert str(caught.value) == f"{path}: {line}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model]\nfolder = \n", "not valid TOML: Invalid value (at line 2, column 10)"),
        ("[data]\nfiles = 'x'\n", "model.folder is missing; required: a non-empty string"),
        ("[model]\nfolder = 'm'\n", "data.files is missing; required: a list, each a non-empty string"),
        ("model = 'm'\n", 'model: got "m", allowed: a table, written as [model]'),
        ("[[model]]\nfolder = 'm'\n", "model: got [a table], allowed: a table, written as [model]"),
        (MINIMAL + "[train]\nsteps = {a = 1}\n", "train.steps: got a table, allowed: an integer of at least 1"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}: {line}"


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.toml: cannot be read: No such file or directory$"):
        load_recipe(tmp_path / "none.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(RecipeError, match=r"latin\.toml: not UTF-8 text: .* at byte 5$"):
        load_recipe(path)


def test_recipes_built_in_python_are_checked_too() -> None:
    with pytest.raises(RecipeError, match=r"^train\.steps: got 0, allowed: an integer of at least 1$"):
        Train(steps=0)
    with pytest.raises(RecipeError, match=r"^optimizer\.eps: got -1, allowed: a number above 0$"):
        dataclasses.replace(Optimizer(), eps=-1)


def test_command_line_says_one_line_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL)
    assert main(["finetune", str(path), "--set", "train.steps=3", "--set", "train.seed=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f'ciera: {path}: train.seed: got "x", allowed: ') and captured.err.count("\n") == 1


def test_command_line_checks_the_data_before_it_starts_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MINIMAL)
    pattern = str(tmp_path / "*.txt")
    assert main(["finetune", str(path), "--set", f"data.files={pattern}", "--set", "ciera.policy=none"]) == 2
    assert capsys.readouterr().err == f'ciera: data.files: nothing matches "{pattern}" (from {Path.cwd()})\n'


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("ciera 0.")
