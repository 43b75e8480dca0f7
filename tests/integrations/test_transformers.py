"""The callback in a real Trainer of transformers, on two ranks."""

import difflib
import inspect
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import ddpcheck
from tests.tiers import needs
from tests.worlds.test_attached import clean_environment

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.slow,  # a framework; `make test` has its smoke tests
]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FAULT = "DDP514 error loss steps 0"


def train(folder, model="gpt2", *, equal=False, override=False, function=False, items=24, evaluates=False, **arguments):
    """What the callback has found, and the FindingWarnings that were shown, in some steps of a Trainer."""
    import torch
    import transformers
    from torch.nn.functional import cross_entropy

    from ddpcheck.integrations.transformers import DDPCheckCallback

    words = 32

    class Sentences(torch.utils.data.Dataset):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            length = 9 if equal else 2 + int(torch.randint(8, (1,), generator=generator))
            tokens = torch.randint(1, words, (9,), generator=generator)
            there = torch.arange(9) < length
            return {"input_ids": tokens * there, "attention_mask": there.long(), "labels": tokens.where(there, -100)}

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    def sum_over_items(outputs, labels, num_items_in_batch):
        logits = outputs["logits"].flatten(0, 1)
        return cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    def build():
        small = {"vocab_size": words, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        if model == "gpt2":
            config = transformers.GPT2Config(vocab_size=words, n_positions=16, n_embd=16, n_layer=2, n_head=2)
            return transformers.GPT2LMHeadModel(config)
        if model == "llama":
            config = transformers.LlamaConfig(
                num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True, **small
            )
            return transformers.LlamaForCausalLM(config)
        config = transformers.BertConfig(num_hidden_layers=1, max_position_embeddings=16, **small)
        bert = transformers.BertForMaskedLM(config)
        if model == "bert with pooler":
            bert.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(config)
        return bert

    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "save_strategy": "no", "logging_strategy": "no"}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "output_dir": folder, "learning_rate": 0.01}
    callback = DDPCheckCallback(on_finding="warn")
    torch.manual_seed(torch.distributed.get_rank())  # DDP gives every rank rank 0's parameters
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trainer = (OwnLoss if override else transformers.Trainer)(
            model=build(),
            args=transformers.TrainingArguments(**{**settings, **arguments}),
            train_dataset=Sentences(items),
            eval_dataset=Sentences(4) if evaluates else None,
            compute_loss_func=sum_over_items if function else None,
            callbacks=[callback],
        )
        trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert not trainer.model_wrapped._forward_hooks, "the callback has not let go"
    return describe(callback.findings), sum(issubclass(w.category, ddpcheck.FindingWarning) for w in shown)


def counting(findings):
    """All but notes."""
    return [finding for finding in findings if " note " not in finding]


def describe(findings):
    """Code, severity, subjects, steps and evidence of each, on a line."""
    return [
        f"{f.code} {f.severity.value} {','.join(f.subjects)} steps {','.join(map(str, f.steps))} "
        + "; ".join(f.evidence)
        for f in findings
    ]


@pytest.fixture(scope="module")
def world():
    with ddpcheck.World(world_size=2, timeout=200, preload=["transformers.trainer"]) as world:
        yield world


@pytest.fixture
def trained(world, tmp_path):
    def run(**arguments):
        (findings, shown), (of_rank_1, shown_by_1) = world.run(train, str(tmp_path), **arguments)
        assert findings == of_rank_1 and not shown_by_1  # the first rank speaks for all
        return findings, shown

    return run


HEALTHY = {
    "padding and accumulation": {"gradient_accumulation_steps": 4, "max_steps": 2},
    "a shorter last accumulation": (
        {"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1, "items": 21}
    ),
    "no search for unused parameters, tied embeddings": {"model": "llama", "ddp_find_unused_parameters": False},
    "re-entrant checkpoints": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        | {"gradient_accumulation_steps": 2}
    ),
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "evaluation and saving": {"evaluates": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "equal counts in a loss of one's own": {"equal": True, "override": True, "gradient_accumulation_steps": 2},
    "a sum over items, for a model that ignores their number": (
        {"model": "bert", "function": True, "gradient_accumulation_steps": 2}
    ),
}


SMOKE = "padding and accumulation"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.smoke] * (case == SMOKE)) for case in HEALTHY])
def test_a_healthy_trainer_is_left_in_peace(trained, case):
    findings, shown = trained(**HEALTHY[case])
    assert counting(findings) == [] and shown == 0


@pytest.mark.parametrize("ignores_items", [{"override": True}, {"model": "bert"}], ids=str)
def test_a_mean_of_means_over_micro_batches_is_found_in_the_first_step(trained, ignores_items):
    findings, shown = trained(gradient_accumulation_steps=2, **ignores_items)
    [finding] = counting(findings)
    assert finding.startswith(FAULT) and shown == 1
    counts = [int(number) for number in re.findall(r"(\d+)[,;]", finding.partition("micro-batch: ")[2] + ";")]
    assert len(set(counts)) > 1 and "rank 1:" in finding


def test_ranks_that_divide_by_their_own_number_of_tokens_are_found(trained):
    findings, _ = trained(override=True)
    assert [finding[:27] for finding in counting(findings)] == ["DDP305 warning loss steps 0"]
    findings, _ = trained(average_tokens_across_devices=False, gradient_accumulation_steps=2)
    assert [finding[:19] for finding in counting(findings)] == ["DDP305 warning loss"]


@pytest.mark.smoke
def test_a_pooler_that_nothing_uses_is_named_in_the_first_step(trained):
    findings, _ = trained(model="bert with pooler", equal=True, ddp_find_unused_parameters=False)
    start = "DDP102 error bert.pooler.dense.weight,bert.pooler.dense.bias steps 0"
    assert findings and findings[0].startswith(start)


def run_example(name, folder):
    """Run an example as a program, on a rank that is there already; the error that it ends with, if it does."""
    import os

    os.chdir(folder)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def added(name):
    """The lines of code that the checked example has more than the plain one, docstrings aside."""
    plain, checked = (
        (EXAMPLES / f"{name}{end}.py").read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
        for end in ("", "_checked")
    )
    lines = [line for line in difflib.ndiff(plain, checked) if line[0] in "+-" and line[1:].strip()]
    assert all(line[0] == "+" for line in lines)
    return [line[1:].strip() for line in lines]


def test_the_examples_end_as_the_page_says_and_differ_by_the_callback_alone(world, tmp_path):
    for name in ("masked_lm", "tagging"):
        assert added(f"transformers/{name}") == [
            "from ddpcheck.integrations.transformers import DDPCheckCallback",
            "callbacks=[DDPCheckCallback()],",
        ]
    assert world.run(run_example, "transformers/masked_lm.py", str(tmp_path)) == [None, None]
    for error, message in world.run(run_example, "transformers/tagging.py", str(tmp_path)):
        assert error == "RuntimeError" and "Expected to have finished reduction in the prior iteration" in message
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    program = (EXAMPLES / "transformers/tagging_checked.py").read_text(encoding="utf-8")
    for error, message in world.run(run_example, "transformers/tagging_checked.py", str(tmp_path)):
        assert error == "FindingsError" and "bert.pooler.dense.weight" in message and "in step 0" in message
        assert message in page and message[:6] in program


@pytest.mark.launchers
def test_the_checked_example_under_torchrun_says_what_the_page_shows(tmp_path):
    script = EXAMPLES / "transformers/masked_lm_checked.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    said = re.search(r"^(\[rank\d\]: )(ddpcheck\.FindingsError: .*\n(?:\1 .*\n)*)", done.stderr, re.MULTILINE)
    assert said is not None, done.stderr
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    assert said[2].replace(said[1], "") in page


def test_in_one_process_the_callback_does_nothing(tmp_path, monkeypatch):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ddpcheck.integrations.transformers import DDPCheckCallback

    callback = DDPCheckCallback()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_begin(arguments, TrainerState(), TrainerControl(), model=None)
        callback.on_epoch_end(arguments, TrainerState(), TrainerControl())
        callback.on_train_end(arguments, TrainerState(), TrainerControl())
    assert callback.findings == ()


@pytest.mark.smoke
def test_a_wrong_choice_is_refused_where_it_is_made():
    from ddpcheck.integrations.transformers import DDPCheckCallback

    with pytest.raises(ddpcheck.UsageError, match="on_finding is"):
        DDPCheckCallback(on_finding="shout")


@pytest.mark.smoke
def test_the_callback_takes_every_option_of_watch():
    from ddpcheck.integrations.transformers import DDPCheckCallback

    watched = set(inspect.signature(ddpcheck.watch).parameters) - {"wrapper"}
    assert watched <= set(inspect.signature(DDPCheckCallback).parameters)
