"""What balancing sees of an experts module: matrices in home slots, where optimizers keep them, how clones run.

Two modules, one view. Megatron's SequentialMLP has a parameter for every matrix of every expert, our GroupedExperts
(`--hybrid-ep-grouped-gemm`) one for a matrix of all local experts. Either way, matrix n of the expert in home slot s is
a run of elements of some parameter; pushing, summing gradients and moving experts need to know no more.
"""

import functools

import torch


class ExpertWeights:
    """The matrices of the experts of a layer on this rank.

    num_homes: home slots. shapes, sizes: of the matrices of one expert. owners: all parameters.
    """

    def __init__(self, experts, num_homes, shapes):
        self.experts, self.num_homes = experts, num_homes
        self.forward = experts.forward  # before clones take its place
        self.shapes, self.sizes = shapes, [shape.numel() for shape in shapes]
        self.owners = list(experts.parameters())

    def place(self, slot, n):
        """(parameter, offset): matrix n of the expert in a home slot is its elements from `offset` on."""
        raise NotImplementedError

    def weight(self, slot, n):
        """That matrix, as it is in force now: optimizers re-point parameters."""
        return self.part(self.place(slot, n)[0].detach(), slot, n)

    def part(self, like_owner, slot, n):
        """The elements of matrix n in a tensor of its parameter's shape (a gradient, say), as a view [*shapes[n]]."""
        first = self.place(slot, n)[1]
        return like_owner.view(-1)[first : first + self.sizes[n]].view(self.shapes[n])


class SequentialWeights(ExpertWeights):
    """Of SequentialMLP: one MLP after the other, clones as functional calls of the first."""

    def __init__(self, experts):
        local = experts.local_experts
        super().__init__(experts, len(local), [p.shape for p in local[0].parameters()])
        self.names = [name for name, _ in local[0].named_parameters()]
        self.parameters = [list(expert.parameters()) for expert in local]

    def place(self, slot, n):
        return self.parameters[slot][n], 0

    def run(self, rows, tokens_per_expert, probs, stacks, in_slots):
        """(outputs of homes and clones [P, H], bias). stacks: weights of the clones, [slots, *shape] a matrix.

        in_slots: context in which operators that read `stacks` run."""
        counts = tokens_per_expert.tolist()
        first = sum(counts[: self.num_homes])
        output, bias = self.forward(rows[:first], tokens_per_expert[: self.num_homes], probs[:first])
        outputs = [output]
        with in_slots:
            for *mine, count in zip(*(stack.unbind(0) for stack in stacks), counts[self.num_homes :], strict=True):
                call = (rows[first : first + count], probs[first : first + count])
                replaced = dict(zip(self.names, mine, strict=True))
                outputs.append(torch.func.functional_call(self.experts.local_experts[0], replaced, call)[0])
                first += count
        return torch.cat(outputs), bias

    def name_logically(self, homes):
        """Checkpoints call experts by their ids, wherever they live."""
        self.experts.sharded_state_dict = _logical_sharded_state_dict(self.experts, homes)


class StackedWeights(ExpertWeights):
    """Of GroupedExperts: grouped GEMMs over two stacks, the parameter and the slots. No weight is copied."""

    def __init__(self, experts):
        super().__init__(experts, experts.num_local_experts, [p.shape[1:] for p in experts.parameters()])

    def place(self, slot, n):
        return self.owners[n], slot * self.sizes[n]

    def run(self, rows, tokens_per_expert, probs, stacks, in_slots):
        """As SequentialWeights.run."""
        with in_slots:
            return self.forward(rows, tokens_per_expert, probs, clones=stacks)

    def name_logically(self, homes):
        """Checkpoints call experts by their ids, wherever they live."""
        self.experts.expert_ids = functools.partial(homes.experts_of, self.experts.ep_group.rank())


def weights_of(experts, mode):
    """The view of an experts module. ValueError for one that balancing does not know."""
    if hasattr(experts, "expert_weights"):
        return StackedWeights(experts)
    if hasattr(experts, "local_experts"):
        return SequentialWeights(experts)
    raise ValueError(
        f"--hybrid-ep-balance {mode} works with SequentialMLP experts and with those of --hybrid-ep-grouped-gemm, not "
        f"{type(experts).__name__}: give --hybrid-ep-grouped-gemm, drop --moe-grouped-gemm, or balance off"
    )


def _logical_sharded_state_dict(experts, homes):
    """A replacement for SequentialMLP.sharded_state_dict whose global offsets are logical ids, wherever experts live.

    Megatron numbers an expert ep_rank * num_local_experts + i. For every expert alone it is told of a group of
    num_experts ranks, of which this is the one with the expert's id.
    """
    original = type(experts).sharded_state_dict

    class OneRankAnExpert:
        def __init__(self, expert):
            self.rank, self.size = lambda: expert, lambda: len(homes.slot_of)

    def sharded_state_dict(prefix="", sharded_offsets=(), metadata=None):
        found, mine = {}, homes.experts_of(experts.ep_group.rank())
        for local, expert in enumerate(mine):
            one = type("OneExpert", (), {})()
            one.__dict__.update(experts.__dict__, num_local_experts=1, ep_group=OneRankAnExpert(expert))
            one.local_experts = [experts.local_experts[local]]
            part = original(one, prefix, sharded_offsets, metadata)
            place = f"{prefix}local_experts."
            found |= {f"{place}{local}{key.removeprefix(place + '0')}": value for key, value in part.items()}
        return found

    return sharded_state_dict
