"""The loss of on-policy distillation against the paper's formula in float64, torch's autograd and trl."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_c.distill import generalized_jsd_loss
from deepspeed_c.errors import BackwardError, ConfigError, ModelError
from deepspeed_c.ops import divergence

BETAS = [0.0, 1.0, 0.5, 0.1, 0.97]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [1, 2, 7, 131, 1031, 4099]


def logits(*shape, seed, dtype=torch.float32, size=4.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def formula(student, teacher, beta, temperature=1.0):
    """Equation 1 of arXiv 2306.13649 in float64, token by token; a term of probability 0 is 0."""
    p, q = ((each.double() / temperature).softmax(-1) for each in (teacher, student))

    def kl(a, b):
        return torch.where(a > 0, a * (a.clamp(min=1e-300) / b.clamp(min=1e-300)).log(), 0).sum(-1)

    if beta == 0:
        return kl(p, q)
    if beta == 1:
        return kl(q, p)
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def with_gradient(loss_of, student):
    leaf = student.detach().clone().requires_grad_()
    loss = loss_of(leaf)
    weights = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), leaf)
    return loss.detach(), gradient


def check(found, wanted, dtype):
    (loss, gradient), (true_loss, true_gradient) = found, wanted
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 0.0}[dtype]
    torch.testing.assert_close(loss.double(), true_loss.double(), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), true_gradient.double(), rtol=1.01 * rounding, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_loss_and_gradient_are_those_of_the_formula(dtype, beta, vocab_size):
    student = logits(3, 5, vocab_size, seed=1, dtype=dtype)
    teacher = logits(3, 5, vocab_size, seed=2, dtype=DTYPES[(DTYPES.index(dtype) + 1) % 3])
    found = with_gradient(lambda x: generalized_jsd_loss(x, teacher, None, beta, 1.7, "none"), student)
    wanted = with_gradient(lambda x: formula(x, teacher, beta, 1.7), student.double())
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    check(found, wanted, dtype)


@pytest.mark.parametrize("beta", BETAS)
def test_torch_computes_the_same_in_chunks_where_no_kernel_does(beta):
    student, teacher = (logits(7, 13, seed=seed).double() for seed in (3, 4))
    student[0, 3] = teacher[0, 3] = teacher[1, 2] = -torch.inf
    is_counted = torch.tensor([1, 1, 0, 1, 1, 0, 1]).bool()

    def loss_of(chunk):
        def of(x):
            return divergence.rows(x, teacher, is_counted, beta, 0.5, chunk)[0]

        return of

    known = torch.arange(7) != (1 if beta == 1 else -1)  # the reverse KL of row 1 is infinite
    found = {chunk: with_gradient(loss_of(chunk), student) for chunk in (1, 3, 7, 100)}
    wanted = with_gradient(lambda x: formula(x, teacher, beta, 2.0) * is_counted, student)
    for loss, gradient in found.values():
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss[known], wanted[0][known], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient[2:], wanted[1][2:], rtol=1e-10, atol=1e-12)
        assert not gradient[2].any()
    by_kernel = with_gradient(
        lambda x: divergence.rows(x, teacher.float(), is_counted, beta, 0.5, 1)[0], student.float()
    )
    torch.testing.assert_close(by_kernel[0].double(), found[3][0], rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(by_kernel[1].double()[2:], found[3][1][2:], rtol=0, atol=3e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_in_float64(beta):
    teacher = logits(4, 5, seed=6).double()
    labels = torch.tensor([1, -100, 2, 0])
    for top_k in (None, 3):
        student = logits(4, 5, seed=5).double().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, k=top_k: generalized_jsd_loss(x, teacher, labels, beta, 0.8, "sum", k, chunk=3), (student,)
        )


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
@pytest.mark.parametrize("beta", [0, 1, 0.3])
@pytest.mark.parametrize("has_labels", [False, True])
def test_trls_loss_is_the_same(reduction, beta, has_labels):
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = (logits(2, 6, 37, seed=seed) for seed in (7, 8))
    labels = torch.tensor([[-100, -100, 3, 4, 5, -100], [1, 2, 3, 4, 5, 6]]) if has_labels else None
    arguments = (labels, beta, 0.9, reduction)
    found = with_gradient(lambda x: generalized_jsd_loss(x, teacher, *arguments), student)
    wanted = with_gradient(lambda x: gkd.GKDTrainer.generalized_jsd_loss(x, teacher, *arguments), student)
    torch.testing.assert_close(found[0], wanted[0], rtol=5e-6, atol=1e-7)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_takes_the_teachers_largest_and_renormalizes(beta, k):
    student, teacher = logits(2, 3, 11, seed=9), logits(2, 3, 11, seed=10)
    columns = teacher.argsort(-1, descending=True)[..., :k]
    found = with_gradient(lambda x: generalized_jsd_loss(x, teacher, None, beta, 1.3, "none", k), student)
    wanted = with_gradient(
        lambda x: formula(x.gather(-1, columns), teacher.gather(-1, columns), beta, 1.3), student.double()
    )
    check(found, wanted, torch.float32)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(0))  # a teacher may send them in any order
    sent = {"teacher_logits": teacher.gather(-1, columns)[..., order], "teacher_indices": columns[..., order].int()}
    again = with_gradient(
        lambda x: generalized_jsd_loss(x, beta=beta, temperature=1.3, reduction="none", **sent), student
    )
    check(again, wanted, torch.float32)
    fewer = generalized_jsd_loss(student, beta=beta, temperature=1.3, reduction="none", top_k=1, **sent)
    assert not fewer.any(), fewer
    assert torch.equal(
        generalized_jsd_loss(student, teacher, beta=beta, top_k=12), generalized_jsd_loss(student, teacher, beta=beta)
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_tokens_without_a_label_are_not_read(dtype):
    student, teacher = logits(2, 4, 9, seed=11, dtype=dtype), logits(2, 4, 9, seed=12, dtype=dtype)
    labels = torch.tensor([[-100, 1, -100, 2], [-100] * 4])
    kept = labels != -100
    for hidden in (torch.nan, -torch.inf):
        blinded = [each.masked_fill((labels == -100).unsqueeze(-1), hidden) for each in (student, teacher)]
        found = with_gradient(lambda x, b=blinded: generalized_jsd_loss(x, b[1], labels, 0.5), blinded[0])
        wanted = with_gradient(lambda x: formula(x, teacher, 0.5)[kept].mean(), student.double())
        check(found, wanted, dtype)
        assert not found[1][~kept].any()
    nothing = torch.full_like(labels, -100)
    for reduction in ("batchmean", "sum", "mean", "none"):
        loss, gradient = with_gradient(
            lambda x, how=reduction: generalized_jsd_loss(x, teacher, nothing, reduction=how), student
        )
        assert not loss.any() and not gradient.any(), (reduction, loss)


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5), (5,)])
def test_without_rows_and_without_a_batch(shape):
    student, teacher = logits(*shape, seed=13), logits(*shape, seed=14)
    for dtype in (torch.float32, torch.float64):
        loss, gradient = with_gradient(
            lambda x, kind=dtype: generalized_jsd_loss(x, teacher.to(kind)), student.to(dtype)
        )
        assert loss.shape == () and gradient.shape == shape
        assert bool(loss == 0) == (0 in shape), loss


def test_tensors_of_any_strides():
    student, teacher = logits(7, 4, seed=15).t(), logits(4, 14, seed=16)[:, ::2]
    wanted = with_gradient(lambda x: formula(x, teacher, 0.5), student.double())
    check(with_gradient(lambda x: generalized_jsd_loss(x, teacher, reduction="none"), student), wanted, torch.float32)


def test_infinite_and_missing_numbers():
    some, other = torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0, 0.0]])
    for kind in (torch.float32, torch.float64):
        a, b = some.to(kind), other.to(kind)
        loss, gradient = with_gradient(lambda x, t=b: generalized_jsd_loss(x, t), a)
        assert abs(loss.item() - math.log(2) / 2) < 1e-6 and gradient.isfinite().all(), (loss, gradient)
        assert generalized_jsd_loss(a, b, beta=0).isinf() and generalized_jsd_loss(a, b, beta=1).isinf()
        # The forward KL is finite where only the teacher lacks a token.
        assert generalized_jsd_loss(torch.zeros(1, 3, dtype=kind), a, beta=0).item() == pytest.approx(math.log(1.5))
        # A NaN stays, so that a loss scaler sees it.
        broken = a.clone()
        broken[0, 1] = torch.nan
        assert generalized_jsd_loss(broken, a).isnan() and generalized_jsd_loss(a, broken).isnan()
        for own, wanted in ((torch.full_like(a, -torch.inf), a), (a, torch.full_like(a, -torch.inf))):
            with pytest.raises(ModelError, match="all logits of row 0 are -inf"):
                generalized_jsd_loss(own, wanted)


def test_equal_distributions_have_no_loss():
    student = logits(5, 1031, seed=17)
    for beta in BETAS:
        loss, gradient = with_gradient(lambda x, b=beta: generalized_jsd_loss(x, student, beta=b), student)
        assert loss == 0 and not gradient.any(), (beta, loss)


def test_the_teacher_gets_no_gradient_and_second_derivatives_are_refused():
    for dtype in (torch.float32, torch.float64):
        student = logits(3, 5, seed=18).to(dtype).requires_grad_()
        teacher = logits(3, 5, seed=19).to(dtype).requires_grad_()
        loss = generalized_jsd_loss(student, teacher)
        (gradient,) = torch.autograd.grad(loss, student, create_graph=True)
        with pytest.raises(BackwardError, match="second derivative"):
            gradient.sum().backward()
        generalized_jsd_loss(student, teacher).backward()
        assert teacher.grad is None and student.grad is not None


def test_a_compiled_graph_computes_the_same():
    student, teacher = logits(3, 7, seed=20), logits(3, 7, seed=21)
    labels = torch.tensor([1, -100, 2])
    compiled = torch.compile(generalized_jsd_loss, backend="aot_eager", fullgraph=True)
    found = with_gradient(lambda x: compiled(x, teacher, labels, 0.3), student)
    wanted = with_gradient(lambda x: generalized_jsd_loss(x, teacher, labels, 0.3), student)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"beta": 1.5}, ConfigError, "beta of generalized_jsd_loss: is 1.5"),
        ({"beta": -0.1}, ConfigError, "is -0.1"),
        ({"beta": math.nan}, ConfigError, "is nan"),
        ({"temperature": 0.0}, ConfigError, "temperature of generalized_jsd_loss: is 0.0"),
        ({"temperature": -1.0}, ConfigError, "is -1.0"),
        ({"temperature": math.inf}, ConfigError, "is inf"),
        ({"reduction": "average"}, ConfigError, 'is "average"'),
        ({"top_k": 0}, ConfigError, "top_k of generalized_jsd_loss: is 0"),
        ({"chunk": 0}, ConfigError, "chunk of generalized_jsd_loss: is 0"),
        ({"teacher_logits": torch.zeros(2, 3, 6)}, ModelError, r"student's logits are \[2, 3, 5\], the teacher's"),
        ({"teacher_logits": torch.zeros(2, 3, 5).long()}, ModelError, "teacher's logits are torch.int64"),
        ({"student_logits": torch.zeros(2, 3, 0)}, ModelError, "without a vocabulary"),
        ({"student_logits": torch.tensor(1.0)}, ModelError, "without a vocabulary"),
        ({"labels": torch.zeros(2, 2).long()}, ModelError, r"labels are torch.int64 \[2, 2\]"),
        ({"labels": torch.zeros(2, 3)}, ModelError, "labels are torch.float32"),
        ({"labels": torch.zeros(2, 3, device="meta").long()}, ModelError, "labels are on meta"),
        ({"teacher_indices": torch.zeros(2, 3, 2).long()}, ModelError, "teacher_indices are torch.int64"),
        ({"teacher_indices": torch.full((2, 3, 5), 9)}, ModelError, "token id 9 is not in the student's vocabulary"),
        ({"teacher_indices": torch.full((2, 3, 5), -1)}, ModelError, "token id -1 is not"),
        ({"teacher_indices": torch.zeros(2, 3, 5).int()}, ModelError, "row 0 has a token id twice"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, message):
    given = {"student_logits": torch.zeros(2, 3, 5), "teacher_logits": torch.zeros(2, 3, 5)}
    with pytest.raises(error, match=message):
        generalized_jsd_loss(**{**given, **changes})
