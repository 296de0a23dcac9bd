// The products of a decode step, streamed: every block keeps a ring of weights full from the first
// instruction to the last, and what lies between two products is done while the ring fills.
//
// stream_*_one: a step of one token. Every streaming block makes the launch's inputs itself, in shared memory;
// blocks behind them make what leaves the launch. stream_*_many: of up to eight tokens, with inputs that
// stream_prepare has made. Grid: one block of eight warps a multiprocessor; a tile of 16 rows belongs to
// `warps_per_tile` warps, each with a slice of the columns. Bound by the rate at which weights are read.
#include "combine.cuh"
#include "inputs.cuh"
#include "products.cuh"
#include "routing.cuh"

namespace rewright {

constexpr int kThreads = 256;

namespace {

// A tile of the launch: of a plain matrix, or of an expert's.
struct Job {
  int segment, tile, expert;  // expert: ordinal in Chosen, -1 for plain ones
};

template <bool kRoutes>
DEVICE Job job_at(const StreamParams& p, int index) {
  Job job{0, index, -1};
  if (kRoutes && index >= p.jobs) {
    job.expert = (index - p.jobs) / p.expert_tiles;
    job.tile = (index - p.jobs) % p.expert_tiles;
  }
#pragma unroll 1
  for (int s = 0; s < p.count; ++s) {
    if (kRoutes && (p.segments[s].experts != 0) != (job.expert >= 0)) continue;
    job.segment = s;
    if (job.tile < p.segments[s].tiles) break;
    job.tile -= p.segments[s].tiles;
  }
  return job;
}

// The groups of a grouped matrix whose tiles this block has begin here.
DEVICE int first_group(const StreamParams& p, const Segment& s) {
  return (int)((i64)blockIdx.x * p.jobs / p.streamers) / s.tiles_per_group;
}

template <bool kOne>
DEVICE Operand<kOne> operand_of(const StreamParams& p, const Segment& s, int tile, const char* shared, int lane) {
  const Input& in = p.inputs[s.input];
  const bool quantised = s.format == kE4m3Quantised || s.format == kE2m1Quantised;
  i64 first = 0;
  if (s.tiles_per_group) first = (i64)(tile / s.tiles_per_group - (kOne ? first_group(p, s) : 0)) * s.columns * 2;
  Operand<kOne> x{};
  if (kOne) {
    x.row = shared + (quantised ? in.shared_offset + (in.bf16 ? in.columns * 2 : 0) : in.shared_offset) + first;
    x.even = (const u8*)shared + in.shared_exponents;
  } else {
    const int g = lane >> 2, t = lane & 3;
    const Prepared& staged = in.staged;
    const char* base = quantised ? (const char*)staged.values + g * staged.values_pitch : (const char*)staged.bf16 + g * staged.bf16_pitch;
    x.row = g < p.rows ? base + first : nullptr;
    x.even = 2 * t < p.rows ? staged.exponents + 2 * t * staged.exponents_pitch : nullptr;
    x.odd = 2 * t + 1 < p.rows ? staged.exponents + (2 * t + 1) * staged.exponents_pitch : nullptr;
  }
  return x;
}

DEVICE void store_tile(const Segment& s, int tile, const float (&sum)[4], int tokens, const signed char* choice, int choices, int lane) {
  const int g = lane >> 2, t = lane & 3;
  UNROLL for (int i = 0; i < 4; ++i) {
    const int m = 2 * t + (i & 1), row = tile * 16 + g + (i >> 1) * 8;
    if (m >= tokens || row >= s.rows) continue;
    i64 at = m;
    if (choice != nullptr) {
      if (choice[m] < 0) continue;
      at = (i64)m * choices + choice[m];
    }
    char* out = (char*)s.out + at * s.out_pitch;
    if (s.out_f32) ((float*)out)[row] = sum[i];
    else ((u16*)out)[row] = float_to_bf16(sum[i]);
  }
}

DEVICE bool is_masked(const StreamParams& p, int row) {
  return p.n_valid != nullptr && row % p.tokens_per_sequence >= p.n_valid[row / p.tokens_per_sequence];
}

template <bool kOne, unsigned kFormats, unsigned kKinds, bool kCombine, bool kRoutes>
DEVICE void stream(const StreamParams& p) {
  DYNAMIC_SHARED(words);
  char* shared = (char*)words;
  __shared__ Chosen chosen;
  __shared__ int ids[kMostPairs];
  __shared__ int arrived[32], summed[32];  // of each group of warps and each of its two places for sums
  const int lane = lane_id(), warp = warp_id(), warps = blockDim.x >> 5;
  // Blocks behind the streaming ones make what leaves a launch of one token: inputs that others read too,
  // and the coefficients that put the sub-block's output back.
  const bool aside = kOne && (int)blockIdx.x >= p.streamers;
  const int groups = warps / p.warps_per_tile, group = warp / p.warps_per_tile, slice = warp % p.warps_per_tile;
  // Tiles go round the blocks; those of grouped matrices lie side by side, so that a block needs the input
  // of two groups at most.
  const bool side_by_side = kOne && p.side_by_side;
  const int low = side_by_side ? (int)((i64)blockIdx.x * p.jobs / p.streamers) : 0;
  int jobs = side_by_side ? (int)((i64)(blockIdx.x + 1) * p.jobs / p.streamers) : p.jobs;
  const int first = side_by_side ? low + group : group * p.streamers + blockIdx.x, step = side_by_side ? groups : groups * p.streamers;
  char* ring = shared + p.shared_ring + warp * kStages * kSlotBytes;

  // The stream's head: the next block to fetch. `limit` grows once the experts are known.
  int ahead = first, limit = aside ? 0 : jobs, slot_in = 0;
  Cursor head{};
  head.at = head.end = 0;
  const auto advance = [&]() {  // to the next tile with blocks for this warp
    while (head.at >= head.end && ahead < limit) {
      const Job job = job_at<kRoutes>(p, ahead);
      const Segment& s = p.segments[job.segment];
      const int blocks = blocks_of(s);
      head = open_tile(s, !kRoutes || job.expert < 0 ? 0 : chosen.expert[job.expert], job.tile, blocks * slice / p.warps_per_tile,
                       blocks * (slice + 1) / p.warps_per_tile);
      ahead += step;
    }
    return head.at < head.end;
  };
  const auto fetch_next = [&]() {
    fetch(head, ring + slot_in * kSlotBytes, lane);
    slot_in = slot_in + 1 == kStages ? 0 : slot_in + 1;
  };
  int started = 0;
  while (started < kStages && advance()) {
    fetch_next();
    copy_commit();
    ++started;
  }

  // Meanwhile: inputs, and the choice of experts.
  if (threadIdx.x < 32) arrived[threadIdx.x] = summed[threadIdx.x] = 0;
  if (kOne) {
    const int from = aside ? (int)blockIdx.x - p.streamers : 0, to = aside ? from + 1 : p.inputs_count;
#pragma unroll 1
    for (int i = from; i < to; ++i) {
      const Input& in = p.inputs[i];
      if (p.side_by_side) {
        const Segment& s = p.segments[0];
        const int group = first_group(p, s), begin = group * s.columns;
        const int count = min(s.tiles / s.tiles_per_group - group, 2) * s.columns;
        for (int k = threadIdx.x * 8; k < count; k += blockDim.x * 8) {
          *(uint4*)(shared + in.shared_offset + k * 2) = *(const uint4*)((const u16*)in.x + begin + k);
        }
        continue;
      }
      Prepared target = in.results;
      if (!aside) {
        target = Prepared{};
        u16* bf16 = (u16*)(shared + in.shared_offset);
        if (in.bf16) target.bf16 = bf16;
        if (in.quantised) {
          target.values = bf16 + (in.bf16 ? in.columns : 0);
          target.exponents = (u8*)shared + in.shared_exponents;
        }
      }
      u16* keep = target.bf16 ? target.bf16 : target.values ? target.values : (u16*)shared;
      const float logit = prepare<kKinds>(in, 0, target, keep, (float*)(shared + p.shared_scratch));
      if ((kKinds & kMask<kStreams>) && aside && warp == 0 && (in.pre || in.post || in.comb)) put_back_coefficients(in, 0, logit);
    }
    if (aside) return;
  }
  if (kRoutes && p.routing.kind != 0) {
    const Routing& r = p.routing;
    if (kOne && r.kind != 3 && warp == 0) {
      int id;
      float weight;
      choose(r, 0, is_masked(p, 0), id, weight);
      if (lane < r.choices) {
        ids[lane] = id;
        if (blockIdx.x == 0) {
          r.experts[lane] = id;
          r.weights[lane] = weight;
        }
      }
    } else if (!kOne || r.kind == 3) {
      for (int i = threadIdx.x; i < p.rows * r.choices; i += blockDim.x) {
        ids[i] = *(const int*)((const char*)r.experts + i / r.choices * r.experts_pitch + i % r.choices * 4);
      }
      __syncthreads();
    }
    if (warp == 0) collect(chosen, ids, p.rows, r.choices);
  }
  __syncthreads();
  if (kRoutes && p.routing.kind != 0) {
    jobs += chosen.count * p.expert_tiles;
    limit = jobs;
  }
  while (started < kStages) {
    if (advance()) fetch_next();
    copy_commit();
    ++started;
  }

  int slot = 0, turn = 0;
  float* dots = (float*)(shared + p.shared_dots);
  for (int index = first; index < jobs; index += step, ++turn) {
    const Job job = job_at<kRoutes>(p, index);
    const Segment& s = p.segments[job.segment];
    const int blocks = blocks_of(s);
    Cursor at = open_tile(s, !kRoutes || job.expert < 0 ? 0 : chosen.expert[job.expert], job.tile, blocks * slice / p.warps_per_tile,
                          blocks * (slice + 1) / p.warps_per_tile);
    const Operand<kOne> x = operand_of<kOne>(p, s, job.tile, shared, lane);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    while (at.at < at.end) {
      multiply<kOne, kFormats>(sum, at, ring + slot * kSlotBytes, x, lane, [] {
        copy_wait<kStages - 1>();
        __syncwarp();
      });
      __syncwarp();  // every lane has read the scales
      if (advance()) fetch_next();
      copy_commit();
      slot = slot + 1 == kStages ? 0 : slot + 1;
      pass(at);
    }
    // The slices of a tile are added up in order by the warp that arrives last.
    bool last = true;
    if (p.warps_per_tile > 1) {
      const int place = group * 2 + (turn & 1), round = turn >> 1;
      float4* sums = (float4*)(shared + p.shared_sums) + place * p.warps_per_tile * 32;
      while (load_volatile(&summed[place]) < round) spin();  // the tile before has been added up
      __syncwarp();
      sums[slice * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      __threadfence_block();
      __syncwarp();
      int is_last = 0;
      if (lane == 0) is_last = atomicAdd(&arrived[place], 1) == p.warps_per_tile * (round + 1) - 1;
      last = __shfl_sync(kAllLanes, is_last, 0);
      if (last) {
        __threadfence_block();
        UNROLL for (int i = 0; i < 4; ++i) sum[i] = 0.f;
        for (int k = 0; k < p.warps_per_tile; ++k) {
          const float4 v = sums[k * 32 + lane];
          sum[0] += v.x;
          sum[1] += v.y;
          sum[2] += v.z;
          sum[3] += v.w;
        }
        __threadfence_block();
        __syncwarp();
        if (lane == 0) store_volatile(&summed[place], round + 1);
      }
    }
    if (!last) continue;
    if (kCombine && p.combine.on) {
      UNROLL for (int i = 0; i < 4; ++i) sum[i] = round_to_bf16(sum[i]);
      combine_tile(p.combine, job.tile, sum, p.rows, dots + (group * kTilesPerGroup + turn) * p.rows * kPartialColumns);
    } else {
      store_tile(s, job.tile, sum, p.rows, !kRoutes || job.expert < 0 ? nullptr : chosen.choice[job.expert], p.routing.choices, lane);
    }
  }
  if (kCombine && p.combine.on && p.combine.fn) sum_dots(p.combine, dots, groups, p.streamers, jobs, p.rows);
}

}  // namespace

// One kernel for each kind of launch of a decode step, with the code that it needs; and one for all others.
// (device/stream_builder.cpp chooses by the same lists.)
constexpr unsigned kSublayer = kMask<kE4m3Quantised, kBf16Bf16, kRowsBf16>, kExperts = kMask<kE4m3Quantised, kE2m1Quantised>;

KERNEL(stream_sublayer_one, StreamParams, kThreads, 1) { stream<true, kSublayer, kMask<kStreams>, false, false>(p); }
KERNEL(stream_head_one, StreamParams, kThreads, 1) { stream<true, kMask<kBf16Bf16>, kMask<kStreams>, false, false>(p); }
KERNEL(stream_normed_one, StreamParams, kThreads, 1) { stream<true, kMask<kE4m3Quantised>, kMask<kRow>, false, false>(p); }
KERNEL(stream_combined_one, StreamParams, kThreads, 1) { stream<true, kMask<kE4m3Quantised>, kMask<kRow>, true, false>(p); }
KERNEL(stream_experts_one, StreamParams, kThreads, 1) { stream<true, kExperts, kMask<kGated, kCodes>, false, true>(p); }
KERNEL(stream_grouped_one, StreamParams, kThreads, 1) { stream<true, kMask<kE4m3Bf16>, kMask<kGiven>, false, false>(p); }
KERNEL(stream_any_one, StreamParams, kThreads, 1) { stream<true, kAllFormats, kAllKinds, true, true>(p); }
KERNEL(stream_sublayer_many, StreamParams, kThreads, 1) { stream<false, kSublayer, 0, false, false>(p); }
KERNEL(stream_normed_many, StreamParams, kThreads, 1) { stream<false, kMask<kE4m3Quantised>, 0, false, false>(p); }
KERNEL(stream_combined_many, StreamParams, kThreads, 1) { stream<false, kMask<kE4m3Quantised>, 0, true, false>(p); }
KERNEL(stream_experts_many, StreamParams, kThreads, 1) { stream<false, kExperts, 0, false, true>(p); }
KERNEL(stream_grouped_many, StreamParams, kThreads, 1) { stream<false, kMask<kE4m3Bf16>, 0, false, false>(p); }
KERNEL(stream_any_many, StreamParams, kThreads, 1) { stream<false, kAllFormats, 0, true, true>(p); }

// Inputs of a step of several tokens. Grid: (rows of an input, inputs); further blocks choose experts.
KERNEL(stream_prepare, StreamParams, kThreads, 1) {
  DYNAMIC_SHARED(words);
  float* scratch = (float*)words;
  const int row = blockIdx.x;
  if ((int)blockIdx.y == p.inputs_count) {
    const Routing& r = p.routing;
    if (row < p.rows && warp_id() == 0) {
      int id;
      float weight;
      choose(r, row, is_masked(p, row), id, weight);
      if (lane_id() < r.choices) {
        *(int*)((char*)r.experts + row * r.experts_pitch + lane_id() * 4) = id;
        *(float*)((char*)r.weights + row * r.weights_pitch + lane_id() * 4) = weight;
      }
    }
    return;
  }
  const Input& in = p.inputs[blockIdx.y];
  if (row >= in.rows) return;
  const Prepared& to = in.staged;
  float logit = 0.f;
  if (in.kind != kGiven && (to.bf16 || to.values || to.codes)) {
    u16* keep = (u16*)(to.bf16 ? (char*)to.bf16 + row * to.bf16_pitch : (char*)to.values + row * to.values_pitch);
    logit = prepare<kAllKinds>(in, row, to, keep, scratch);
  } else if (in.kind == kStreams) {
    logit = mixing_logit(in, ask_for_logits(in, row), scratch);
  }
  if (in.kind == kStreams && (in.pre || in.post || in.comb) && warp_id() == 0) put_back_coefficients(in, row, logit);
}

}  // namespace rewright
