"""Retrieval by words when words are replaced, and the largest cosine by chance."""

import torch

DOCUMENTS, WORDS, LENGTH, QUESTION = 500, 1000, 20, 5
K1 = 1.5
DIMENSIONS = (4, 16, 64, 256, 1024)


def counts(draw):
    """(documents, words) how often each word is in each document; common words are common."""
    frequency = 1.0 / (1 + torch.arange(WORDS, dtype=torch.float64))
    words = torch.multinomial(frequency, DOCUMENTS * LENGTH, replacement=True, generator=draw).view(DOCUMENTS, LENGTH)
    return words, torch.zeros(DOCUMENTS, WORDS, dtype=torch.float64).scatter_add_(
        1, words, torch.ones(DOCUMENTS, LENGTH).double()
    )


def data():
    """Shares of questions whose document is among the first 1 and 10, by replaced words; cosines by dimension."""
    draw = torch.Generator().manual_seed(0)
    words, count = counts(draw)
    n = (count > 0).double().sum(0)
    idf = torch.log(1 + (DOCUMENTS - n + 0.5) / (n + 0.5))
    score = idf * count * (K1 + 1) / (count + K1)  # all documents are equally long
    first, ten = [], []
    for replaced in range(QUESTION + 1):
        picks = torch.stack([torch.randperm(LENGTH, generator=draw)[: QUESTION - replaced] for _ in range(DOCUMENTS)])
        noise = 1e-9 * torch.rand(DOCUMENTS, DOCUMENTS, generator=draw, dtype=torch.float64)  # ties are broken by chance
        ranked = (score[:, words.gather(1, picks)].sum(-1).T + noise).argsort(descending=True)
        rank = (ranked == torch.arange(DOCUMENTS)[:, None]).double().argmax(-1)
        first.append(float((rank < 1).double().mean()))
        ten.append(float((rank < 10).double().mean()))
    chance = []
    for d in DIMENSIONS:
        x = torch.nn.functional.normalize(torch.randn(20, d, generator=draw, dtype=torch.float64), dim=-1)
        y = torch.nn.functional.normalize(torch.randn(1000, d, generator=draw, dtype=torch.float64), dim=-1)
        chance.append(float((x @ y.T).amax(-1).mean()))
    return {"first": first, "ten": ten, "chance": chance}


def draw(figure, data):
    """Two panels."""
    found, chance = figure.subplots(1, 2)
    share = [i / QUESTION for i in range(QUESTION + 1)]
    found.plot(share, data["ten"], "s--", color="#d9822b", label="among the first 10")
    found.plot(share, data["first"], "o-", color="#2f5fb3", label="first")
    found.set(xlabel="share of the question's words replaced", ylabel="share of questions", title="document found by words")
    found.set(ylim=(-0.03, 1.03))
    found.legend(frameon=False)
    chance.semilogx(DIMENSIONS, data["chance"], "o-", color="#2f5fb3", base=2)
    chance.set(xlabel="dimensions", ylabel="cosine", title="largest cosine by chance", ylim=(0, 1.03))
    chance.set_xticks(DIMENSIONS, [f"{d:,}" for d in DIMENSIONS])
