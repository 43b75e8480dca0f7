"""A model and a dataset for mmengine: handwritten digits, with a head of its own for the nines."""

import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


@DATASETS.register_module()
class Digits(torch.utils.data.Dataset):
    """Pixels from 0 to 1, and the digit."""

    def __init__(self, count=320):
        data = load_digits()
        self.images = torch.tensor(data.data[:count], dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target[:count])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


@MODELS.register_module()
class DigitsNet(BaseModel):
    """Which digit it is, and for nines how slanted; with `always` the second head takes part without any nine, too."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.digit = nn.Linear(32, 10)
        self.slant = nn.Linear(32, 1)

    def forward(self, images, labels, mode="tensor"):
        features = self.body(images)
        if mode != "loss":
            return self.digit(features)
        losses = {"loss_digit": F.cross_entropy(self.digit(features), labels)}
        nines = labels == 9
        if nines.any() or self.always:
            slant = images[nines][:, 24:40].mean(1) - 0.5
            losses["loss_slant"] = (self.slant(features[nines]).squeeze(1) - slant).square().sum() / len(labels)
        return losses
