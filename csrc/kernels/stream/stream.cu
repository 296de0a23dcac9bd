// The products of a decode step, streamed: every block keeps a ring of weights full from the first
// instruction to the last, and what lies between two products is done while the ring fills. A block takes
// about half a multiprocessor (the head's all), so that the next launch can begin beside this one and fill
// its rings too, which depend on nothing; it then waits for the end of this one.
//
// stream_*_one: a step of one token. Every streaming block makes the launch's inputs itself, in shared memory;
// blocks behind them make what leaves the launch. stream_*_many: of up to eight tokens, with inputs that
// stream_prepare has made. Grid: one block of eight warps, with experts twelve, a multiprocessor; a tile of
// 16 rows belongs to `warps_per_tile` warps, each with a slice of the columns. Meant to be bound by the rate
// at which weights are read; docs/performance.md says what it reaches.
#include "combine.cuh"
#include "inputs.cuh"
#include "products.cuh"
#include "routing.cuh"

#include "../common/order.cuh"

namespace rewright {

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

template <bool kOne, int kWarps, int kStages, unsigned kFormats, unsigned kKinds, bool kCombine, bool kRoutes>
DEVICE void stream(const StreamLaunch& launch) {
  DYNAMIC_SHARED(words);
  char* shared = (char*)words;
  __shared__ StreamParams p;
  __shared__ Chosen chosen;
  __shared__ int ids[kMostPairs];
  for (int i = threadIdx.x; i < (int)(sizeof(StreamParams) / 16); i += kWarps * 32) ((uint4*)&p)[i] = __ldg((const uint4*)launch.params + i);
  __syncthreads();
  const int lane = lane_id(), warp = warp_id(), per_tile = p.warps_per_tile, streamers = p.streamers;
  // Blocks behind the streaming ones make what leaves a launch of one token: inputs that others read too,
  // and the coefficients that put the sub-block's output back.
  const bool aside = kOne && (int)blockIdx.x >= streamers;
  const int groups = kWarps / per_tile, group = warp / per_tile, slice = warp % per_tile;
  // Tiles go round the blocks; those of grouped matrices lie side by side, so that a block needs the input
  // of two groups at most.
  const bool side_by_side = kOne && p.side_by_side;
  const int low = side_by_side ? (int)((i64)blockIdx.x * p.jobs / streamers) : 0;
  int jobs = side_by_side ? (int)((i64)(blockIdx.x + 1) * p.jobs / streamers) : p.jobs;
  const int first = side_by_side ? low + group : group * streamers + blockIdx.x, step = side_by_side ? groups : groups * streamers;
  char* ring = shared + warp * kStages * kSlotBytes;
  float* scratch = (float*)(shared + p.shared_scratch);

  // What the inputs need.
  constexpr bool kAny = kKinds == kAllKinds;
  const Input& input = p.inputs[aside ? blockIdx.x - streamers : 0];
  Row<true, kWarps, 2> streams;
  Row<false, kWarps, 4> row;
  Gated<kWarps, 1> gated;
  Codes<kWarps> codes;
  Choice<kWarps * 32> choice;
  const bool chooses = kRoutes && kOne && (p.routing.kind == 1 || p.routing.kind == 2);
  const auto ask = [&] {
    if (kOne && !kAny) {
      if (kKinds & kMask<kStreams>) streams.ask(input, 0);
      if (kKinds & kMask<kRow>) row.ask(input, 0);
      if (kKinds & kMask<kGated>) gated.ask(input, 0, 1);
      if (kKinds & kMask<kCodes>) codes.ask(p.inputs[1], 0);
    }
    if (chooses) choice.ask(p.routing, 0);
    if (kRoutes && p.routing.kind != 0 && !chooses) {
      for (int i = threadIdx.x; i < p.rows * p.routing.choices; i += kWarps * 32) {
        ids[i] = *(const int*)((const char*)p.routing.experts + i / p.routing.choices * p.routing.experts_pitch + i % p.routing.choices * 4);
      }
    }
  };
  // Asked for behind the weights, inputs would wait for all of them: so first, if they are there.
  const bool early = launch.order.before != nullptr;
  if (!early) ask();
  const bool combines = kCombine && p.combine.on;
  Kept kept{};
  if (combines) {
    const int tiles = (p.jobs - (int)blockIdx.x + streamers - 1) / streamers;
    kept = kept_in(p.combine, shared + p.shared_kept, aside ? 0 : tiles, blockIdx.x, streamers, p.rows);
    fetch_kept(p.combine, kept, p.rows);
  }

  // The stream's head: the next block to fetch. `limit` grows once the experts are known.
  int ahead = first, limit = aside ? 0 : jobs, slot_in = 0;
  Cursor head{};
  head.at = head.end = 0;
  const auto advance = [&]() {  // to the next tile with blocks for this warp
    while (head.at >= head.end && ahead < limit) {
      const Job job = job_at<kRoutes>(p, ahead);
      const Segment& s = p.segments[job.segment];
      head = open_tile<kFormats>(s, !kRoutes || job.expert < 0 ? 0 : chosen.expert[job.expert], job.tile, s.begins[slice], s.begins[slice + 1]);
      ahead += step;
    }
    return head.at < head.end;
  };
  const auto fetch_next = [&]() {
    fetch<kFormats>(head, ring + slot_in * kSlotBytes, lane);
    slot_in = slot_in + 1 == kStages ? 0 : slot_in + 1;
  };
  int started = 0;
  while (started < kStages && advance()) {
    fetch_next();
    copy_commit();
    ++started;
  }
  if (early) {
    await(launch.order.before, launch.order.blocks);
    ask();
  }

  // The inputs, in shared memory.
  if (kOne) {
    const auto target_of = [&](const Input& in) {
      if (aside) return in.results;
      Prepared target{};
      u16* bf16 = (u16*)(shared + in.shared_offset);
      if (in.bf16) target.bf16 = bf16;
      if (in.quantised) {
        target.values = bf16 + (in.bf16 ? in.columns : 0);
        target.exponents = (u8*)shared + in.shared_exponents;
      }
      return target;
    };
    const auto keep_of = [&](const Prepared& target) { return target.bf16 ? target.bf16 : target.values ? target.values : (u16*)shared; };
    if (side_by_side) {
      const Segment& s = p.segments[0];
      const int from = first_group(p, s), begin = from * s.columns, count = min(s.tiles / s.tiles_per_group - from, 2) * s.columns;
      for (int k = threadIdx.x * 8; k < count; k += kWarps * 256) {
        *(uint4*)(shared + input.shared_offset + k * 2) = *(const uint4*)((const u16*)input.x + begin + k);
      }
    } else if (kAny) {
      const int from = aside ? (int)blockIdx.x - streamers : 0, to = aside ? from + 1 : p.inputs_count;
#pragma unroll 1
      for (int i = from; i < to; ++i) {
        const Prepared target = target_of(p.inputs[i]);
        const float logit = prepare<kWarps>(p.inputs[i], 0, target, keep_of(target), scratch);
        if (aside && warp == 0 && p.inputs[i].kind == kStreams) put_back_coefficients(p.inputs[i], 0, logit);
      }
    } else {
      const Prepared target = target_of(input);
      if (kKinds & kMask<kStreams>) {
        const float logit = streams.finish(input, 0, target, keep_of(target), scratch);
        if (aside && warp == 0) put_back_coefficients(input, 0, logit);
      }
      if (kKinds & kMask<kRow>) row.finish(input, 0, target, keep_of(target), scratch);
      if (kKinds & kMask<kGated>) gated.finish(input, 0, 1, target);
      if (kKinds & kMask<kCodes>) codes.finish(p.inputs[1], 0, target_of(p.inputs[1]));
    }
    if (aside) {
      end_block(launch.order);
      return;
    }
  }
  if (kRoutes && p.routing.kind != 0) {
    const Routing& r = p.routing;
    __shared__ float affinities[kMostExperts];
    __shared__ u32 keys[kMostExperts];
    int id = -1;
    float weight = 0.f;
    if (chooses) choice.finish(r, is_masked(p, 0), affinities, keys, id, weight);
    if (chooses && warp == 0) {
      if (lane < r.choices) {
        ids[lane] = id;
        if (blockIdx.x == 0) {
          r.experts[lane] = id;
          r.weights[lane] = weight;
        }
      }
      __syncwarp();
      if (blockIdx.x == 0 && lane == 0 && launch.order.chosen != nullptr) add_release(launch.order.chosen, 1);
    }
    if (!chooses) __syncthreads();
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
  for (int index = first; index < jobs; index += step, ++turn) {
    const Job job = job_at<kRoutes>(p, index);
    const Segment& s = p.segments[job.segment];
    Cursor at = open_tile<kFormats>(s, !kRoutes || job.expert < 0 ? 0 : chosen.expert[job.expert], job.tile, s.begins[slice], s.begins[slice + 1]);
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
      pass<kFormats>(at);
    }
    // The slices of a tile are added up in order, by one warp of the tile's after the other. The barrier of
    // the next tile is behind the reading of this one's: two places are enough. (Of one token all columns are
    // equal.)
    if (per_tile > 1) {
      const int place = group * 2 + (turn & 1);
      float4* sums = (float4*)(shared + p.shared_sums) + place * per_tile * 32;
      float2* pairs = (float2*)(shared + p.shared_sums) + place * per_tile * 8;
      if (!kOne) sums[slice * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      else if ((lane & 3) == 0) pairs[slice * 8 + (lane >> 2)] = make_float2(sum[0], sum[2]);
      sync_warps(1 + group, per_tile);
      if (slice != turn % per_tile) continue;
      UNROLL for (int i = 0; i < 4; ++i) sum[i] = 0.f;
      for (int k = 0; k < per_tile; ++k) {
        if (kOne) {
          const float2 v = pairs[k * 8 + (lane >> 2)];
          sum[0] += v.x;
          sum[2] += v.y;
        } else {
          const float4 v = sums[k * 32 + lane];
          sum[0] += v.x;
          sum[1] += v.y;
          sum[2] += v.z;
          sum[3] += v.w;
        }
      }
      if (kOne) {
        sum[1] = sum[0];
        sum[3] = sum[2];
      }
    }
    if (combines) {
      keep_tile(kept, turn * groups + group, sum, p.rows);
    } else {
      store_tile(s, job.tile, sum, p.rows, !kRoutes || job.expert < 0 ? nullptr : chosen.choice[job.expert], p.routing.choices, lane);
    }
  }
  if (combines) {
    copy_wait<0>();
    combine(p.combine, kept, p.rows, streamers);
  }
  end_block(launch.order);
}

}  // namespace

// One kernel for each kind of launch of a decode step, with the code that it needs; and one for all others.
// (device/stream_builder.cpp chooses by the same lists. e2m1 takes three times the instructions of e4m3 for a
// byte, which more warps hide. The head is as long as twenty of the others: it has a deep ring in place of half a
// multiprocessor.)
constexpr unsigned kSublayer = kMask<kE4m3Quantised, kBf16Bf16, kRowsBf16>, kExperts = kMask<kE4m3Quantised, kE2m1Quantised>;
constexpr unsigned kE4m3Only = kMask<kE4m3Quantised>, kE4m3Plain = kMask<kE4m3Bf16>, kHead = kMask<kBf16Bf16>;

KERNEL(stream_sublayer_one, StreamLaunch, 256, 2) { stream<true, 8, 4, kSublayer, kMask<kStreams>, false, false>(p); }
KERNEL(stream_head_one, StreamLaunch, 256, 1) { stream<true, 8, 8, kHead, kMask<kStreams>, false, false>(p); }
KERNEL(stream_normed_one, StreamLaunch, 256, 2) { stream<true, 8, 4, kE4m3Only, kMask<kRow>, false, false>(p); }
KERNEL(stream_combined_one, StreamLaunch, 256, 2) { stream<true, 8, 4, kE4m3Only, kMask<kRow>, true, false>(p); }
KERNEL(stream_experts_one, StreamLaunch, 384, 2) { stream<true, 12, 3, kExperts, kMask<kGated, kCodes>, false, true>(p); }
KERNEL(stream_grouped_one, StreamLaunch, 256, 2) { stream<true, 8, 4, kE4m3Plain, kMask<kGiven>, false, false>(p); }
KERNEL(stream_any_one, StreamLaunch, 256, 1) { stream<true, 8, 4, kAllFormats, kAllKinds, true, true>(p); }
KERNEL(stream_sublayer_many, StreamLaunch, 256, 2) { stream<false, 8, 4, kSublayer, 0, false, false>(p); }
KERNEL(stream_normed_many, StreamLaunch, 256, 2) { stream<false, 8, 4, kE4m3Only, 0, false, false>(p); }
KERNEL(stream_combined_many, StreamLaunch, 256, 2) { stream<false, 8, 4, kE4m3Only, 0, true, false>(p); }
KERNEL(stream_experts_many, StreamLaunch, 384, 2) { stream<false, 12, 3, kExperts, 0, false, true>(p); }
KERNEL(stream_grouped_many, StreamLaunch, 256, 2) { stream<false, 8, 4, kE4m3Plain, 0, false, false>(p); }
KERNEL(stream_any_many, StreamLaunch, 256, 1) { stream<false, 8, 4, kAllFormats, 0, true, true>(p); }

// Inputs of a step of several tokens. Grid: (rows of an input, inputs); further blocks choose experts.
KERNEL(stream_prepare, StreamLaunch, 256, 1) {
  DYNAMIC_SHARED(words);
  float* scratch = (float*)words;
  const StreamParams& all = *p.params;
  const int row = blockIdx.x;
  if (p.order.before) await(p.order.before, p.order.blocks);
  if ((int)blockIdx.y == all.inputs_count) {
    const Routing& r = all.routing;
    __shared__ float affinities[kMostExperts];
    __shared__ u32 keys[kMostExperts];
    if (row < all.rows) {
      int id = -1;
      float weight = 0.f;
      Choice<256> choice;
      choice.ask(r, row);
      choice.finish(r, is_masked(all, row), affinities, keys, id, weight);
      if ((int)threadIdx.x < r.choices) {
        *(int*)((char*)r.experts + row * r.experts_pitch + threadIdx.x * 4) = id;
        *(float*)((char*)r.weights + row * r.weights_pitch + threadIdx.x * 4) = weight;
      }
    }
  } else if (const Input& in = all.inputs[blockIdx.y]; row < in.rows && in.kind != kGiven) {
    const Prepared to = in.staged;
    u16* keep = (u16*)(to.bf16 ? (char*)to.bf16 + row * to.bf16_pitch : (char*)to.values + row * to.values_pitch);
    const float logit = prepare<8>(in, row, to, keep, scratch);
    if (in.kind == kStreams && warp_id() == 0) put_back_coefficients(in, row, logit);
  }
  end_block(p.order);
}

}  // namespace rewright
