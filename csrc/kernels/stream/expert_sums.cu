// The experts' second product and the sum over a token's experts, with what lies behind it.
//
// A warp takes whole experts of a tile, so that each one's result is rounded to bf16 before they are added
// up in ascending order of their ids, as the released code does. expert_sums_one: a step of one token, whose
// hidden rows every block gates and quantises itself while its ring fills; expert_sums_many: of up to eight
// tokens, with inputs that stream_prepare has made; a column of the product is a token, zero where it has
// not chosen the expert. Grid: one block of twelve warps a multiprocessor, six warps a tile
// of 16 rows. Meant to be bound by the rate at which weights are read; docs/performance.md says what it reaches.
#include "combine.cuh"
#include "inputs.cuh"
#include "products.cuh"
#include "routing.cuh"

#include "../common/order.cuh"

namespace rewright {

namespace {

template <bool kOne>
DEVICE Operand<kOne> operand_of(const StreamParams& p, const Chosen& chosen, int e, const char* shared, int lane) {
  const Input& in = p.inputs[0];
  const int g = lane >> 2, t = lane & 3, k = p.routing.choices;
  Operand<kOne> x{};
  if (kOne) {
    const int c = chosen.choice[e][0];
    x.row = shared + in.shared_offset + (i64)c * in.columns * 2;
    x.even = (const u8*)shared + in.shared_exponents + c * (in.columns / 128);
    return x;
  }
  const auto choice = [&](int m) { return m < p.rows ? (int)chosen.choice[e][m] : -1; };
  const Prepared& staged = in.staged;
  const bool quantised = p.segments[0].format == kE4m3Quantised || p.segments[0].format == kE2m1Quantised;
  const char* base = quantised ? (const char*)staged.values : (const char*)staged.bf16;
  const i64 pitch = quantised ? staged.values_pitch : staged.bf16_pitch;
  if (choice(g) >= 0) x.row = base + (g * k + choice(g)) * pitch;
  if (choice(2 * t) >= 0) x.even = staged.exponents + (2 * t * k + choice(2 * t)) * staged.exponents_pitch;
  if (choice(2 * t + 1) >= 0) x.odd = staged.exponents + ((2 * t + 1) * k + choice(2 * t + 1)) * staged.exponents_pitch;
  return x;
}

template <bool kOne, int kWarps, int kStages, unsigned kFormats>
DEVICE void expert_sums(const StreamLaunch& launch) {
  DYNAMIC_SHARED(words);
  char* shared = (char*)words;
  __shared__ StreamParams p;
  __shared__ Chosen chosen;
  __shared__ int ids[kMostPairs];
  __shared__ signed char order[kMostTokens][kMostChoices];  // choices of a token by ascending id
  __shared__ float routes[kMostChoices];  // of one token: the choices' weights
  for (int i = threadIdx.x; i < (int)(sizeof(StreamParams) / 16); i += kWarps * 32) ((uint4*)&p)[i] = __ldg((const uint4*)launch.params + i);
  __syncthreads();
  constexpr int kPerTile = kExpertWarpsPerTile, kGroups = kWarps / kPerTile;
  const int lane = lane_id(), warp = warp_id();
  const int& k = p.routing.choices;  // (in shared memory, as what else is used rarely: registers are few)
  const int group = warp / kPerTile, slice = warp % kPerTile;
  const Segment& s = p.segments[0];
  const int blocks = blocks_of<kFormats>(s);
  char* ring = shared + warp * kStages * kSlotBytes;

  const bool early = launch.order.before != nullptr;
  if (early && launch.order.known != nullptr) await(launch.order.known, 1);
  for (int i = threadIdx.x; i < p.rows * k; i += kWarps * 32) {
    ids[i] = *(const int*)((const char*)p.routing.experts + i / k * p.routing.experts_pitch + i % k * 4);
  }
  const Input& in = p.inputs[0];
  Gated<kWarps, 4> gated;
  if (kOne && threadIdx.x < kMostChoices) routes[threadIdx.x] = in.route && (int)threadIdx.x < in.rows ? in.route[threadIdx.x] : 1.f;
  if (kOne && !early) gated.ask(in, 0, in.rows);
  const auto kept = [&] {  // (computed anew where it is used: registers are few)
    const int tiles = (s.tiles - (int)blockIdx.x + p.streamers - 1) / p.streamers;
    return kept_in(p.combine, shared + p.shared_kept, tiles, blockIdx.x, p.streamers, p.rows);
  };
  fetch_kept(p.combine, kept(), p.rows);
  __syncthreads();
  if (warp == 0) {
    collect(chosen, ids, p.rows, k);
    for (int m = lane; m < p.rows; m += 32) {
      for (int c = 0; c < k; ++c) {
        int before = 0;
        for (int d = 0; d < k; ++d) before += ids[m * k + d] < ids[m * k + c] || (ids[m * k + d] == ids[m * k + c] && d < c);
        order[m][before] = (signed char)c;
      }
    }
  }
  __syncthreads();

  int ahead = group * p.streamers + blockIdx.x, expert_ahead = slice, slot_in = 0, slot = 0;
  Cursor head{};
  head.at = head.end = 0;
  const auto advance = [&]() {
    while (head.at >= head.end && ahead < s.tiles) {
      if (expert_ahead >= chosen.count) {
        ahead += kGroups * p.streamers;
        expert_ahead = slice;
        continue;
      }
      head = open_tile<kFormats>(s, chosen.expert[expert_ahead], ahead, 0, blocks);
      expert_ahead += kPerTile;
    }
    return head.at < head.end;
  };
  const auto fetch_next = [&]() {
    if (advance()) {
      fetch<kFormats>(head, ring + slot_in * kSlotBytes, lane);
      slot_in = slot_in + 1 == kStages ? 0 : slot_in + 1;
    }
    copy_commit();
  };
  for (int i = 0; i < kStages; ++i) fetch_next();
  if (early) {
    await(launch.order.before, launch.order.blocks);
    if (kOne) gated.ask(in, 0, in.rows);
  }
  if (kOne) {
    Prepared to{};
    u16* values = (u16*)(shared + in.shared_offset);
    if (in.quantised) {
      to.values = values;
      to.values_pitch = in.columns * 2;
      to.exponents = (u8*)shared + in.shared_exponents;
      to.exponents_pitch = in.columns / 128;
    } else {
      to.bf16 = values;
      to.bf16_pitch = in.columns * 2;
    }
    gated.finish(in, 0, in.rows, to, routes);
  }
  __syncthreads();

  int turn = 0;
  for (int tile = group * p.streamers + blockIdx.x; tile < s.tiles; tile += kGroups * p.streamers, ++turn) {
    const int place = group * 2 + (turn & 1);
    float* sums = (float*)(shared + p.shared_sums) + place * p.rows * k * 16;  // of each token, choice and row
    for (int e = slice; e < chosen.count; e += kPerTile) {
      Cursor at = open_tile<kFormats>(s, chosen.expert[e], tile, 0, blocks);
      const Operand<kOne> x = operand_of<kOne>(p, chosen, e, shared, lane);
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      while (at.at < at.end) {
        multiply<kOne, kFormats>(sum, at, ring + slot * kSlotBytes, x, lane, [] {
          copy_wait<kStages - 1>();
          __syncwarp();
        });
        __syncwarp();
        fetch_next();
        slot = slot + 1 == kStages ? 0 : slot + 1;
        pass<kFormats>(at);
      }
      const int g = lane >> 2, t = lane & 3;
      UNROLL for (int i = 0; i < 4; ++i) {
        const int m = 2 * t + (i & 1), row = g + (i >> 1) * 8;
        if (m >= p.rows || chosen.choice[e][m] < 0) continue;
        sums[(m * k + chosen.choice[e][m]) * 16 + row] = round_to_bf16(sum[i]);
      }
    }
    sync_warps(1 + group, kPerTile);
    if (slice != turn % kPerTile) continue;
    float y[4];
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int m = kOne ? 0 : 2 * t + (i & 1), row = g + (i >> 1) * 8;
      y[i] = 0.f;
      if (m >= p.rows) continue;
#pragma unroll 1
      for (int c = 0; c < k; ++c) {
        const int choice = order[m][c];
        if (ids[m * k + choice] >= 0) y[i] += sums[(m * k + choice) * 16 + row];
      }
      y[i] += bf16_to_float(((const u16*)((const char*)p.combine.shared + m * p.combine.shared_pitch))[tile * 16 + row]);
    }
    keep_tile(kept(), turn * kGroups + group, y, p.rows);
  }
  copy_wait<0>();
  combine(p.combine, kept(), p.rows, p.streamers);
  end_block(launch.order);
}

}  // namespace

KERNEL(expert_sums_one, StreamLaunch, 384, 2) { expert_sums<true, kExpertWarps, kExpertStages, kMask<kE2m1Quantised>>(p); }
KERNEL(expert_sums_any_one, StreamLaunch, 384, 1) { expert_sums<true, kExpertWarps, kExpertStages, kAllFormats>(p); }
KERNEL(expert_sums_many, StreamLaunch, 384, 2) { expert_sums<false, kExpertWarps, kExpertStages, kMask<kE2m1Quantised>>(p); }
KERNEL(expert_sums_any_many, StreamLaunch, 384, 1) { expert_sums<false, kExpertWarps, kExpertStages, kAllFormats>(p); }

}  // namespace rewright
