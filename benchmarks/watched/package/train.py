"""`python -m package.train --width 8`, with relative imports; the model is called by keyword, and its mode is not set."""

import argparse

import torch
from own import Own
from parts import Pictures, loss_of
from torch.utils.data import DataLoader

from .model import Block


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    asked = parser.parse_args()
    model = Block(asked.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held_out = DataLoader(Pictures(80), batch_size=16)
    own = Own()
    for _ in range(2):
        own.begin()
        for images, targets in DataLoader(Pictures(800), batch_size=8):
            own.got()
            loss = loss_of(model(images=images, scale=0.5), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.step(len(images))
        own.end()
        with torch.no_grad():
            for images, _targets in held_out:
                model(images=images)
    own.tell()


if __name__ == "__main__":
    main()
