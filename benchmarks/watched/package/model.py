from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, width, 3), nn.GELU(), nn.Flatten(), nn.Linear(width * 196, 10))

    def forward(self, images, *, scale=1.0):
        return self.inner(images) * scale
