// Parts of the native runtime that need no model. Prints what failed; exit code 1 then.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "../host/formats.h"
#include "../host/math.h"
#include "../host/matmul.h"
#include "../host/sum.h"
#include "../host/vector_sets.h"
#include "../runtime/plan.h"
#include "../runtime/sampler.h"
#include "../runtime/team.h"

namespace {

using namespace rewright;

int failures = 0;

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);          \
      ++failures;                                                          \
    }                                                                      \
  } while (0)

template <typename F>
bool refuses(F f) {
  try {
    f();
  } catch (const PlanError&) {
    return true;
  }
  return false;
}

void types() {
  const Tensor t = parse_type("f32[1,1,4,4|128]");
  EXPECT(t.rank() == 4 && t.pitch == 128 && t.rows() == 4 && t.nbytes() == 512);
  EXPECT(parse_type("e2m1[2,64]").pitch == 32);
  EXPECT(parse_type("i32[3]").nbytes() == 12);
  for (const char* bad : {"", "f32", "f32[", "f32[1", "f32[1,]", "f32[-1]", "f32[1|]", "f32[4|1]", "q8[1]", "f32[1]x",
                          "f32[99999999999999999999]", "f32[4000000000,4000000000,4000000000]", "f32[1,1,1,1,1,1,1,1,1]"}) {
    EXPECT(refuses([bad] { parse_type(bad); }));
  }
}

void formats() {
  for (int code = 0; code < 256; ++code) {
    if ((code & 127) == 127) continue;
    EXPECT(float_to_e4m3(kE4M3[code]) == code);
  }
  for (int code = 0; code < 16; ++code) EXPECT(float_to_e2m1(kE2M1[code]) == code);
  EXPECT(float_to_bf16(1.00390625f) == 0x3f80 && float_to_bf16(1.01171875f) == 0x3f82);  // ties to even
  EXPECT(std::isnan(bf16_to_float(float_to_bf16(NAN))));
  EXPECT(half_to_float(0x3c00) == 1.0f && half_to_float(0x0001) == 0x1p-24f && half_to_float(0xfbff) == -65504.0f);
  EXPECT(e8m0_to_float(0) == 0x1p-127f && e8m0_to_float(254) == 0x1p127f && std::isnan(e8m0_to_float(255)));
}

// Every instruction set of this processor gives the bits of the portable loops.
void vectors() {
  std::vector<const Vector*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&kAvx2);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) sets.push_back(&kAvx512);
#endif
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  constexpr int kCount = 40, kRows = 13;
  std::vector<float> panel(kCount * 16), x(kRows * kCount), start(kRows * 16);
  for (auto* values : {&panel, &x, &start}) {
    for (float& v : *values) v = normal(random);
  }
  std::vector<uint8_t> bytes(kCount * 16);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (uint8_t& b : bytes) b = (b & 127) == 127 ? 1 : b;  // no NaN codes
  std::vector<uint16_t> words(kCount * 16);
  for (uint16_t& w : words) w = static_cast<uint16_t>(random() & 0xbfff);
  for (const Vector* set : sets) {
    const auto same = [&](auto run, size_t size, const std::vector<float>& from) {
      std::vector<float> a(size), b(size);
      std::copy_n(from.begin(), std::min(size, from.size()), a.begin());
      b = a;
      run(kPortable, a.data());
      run(*set, b.data());
      return std::memcmp(a.data(), b.data(), size * sizeof(float)) == 0;
    };
    for (int rows = 1; rows <= kRows; ++rows) {
      EXPECT(same([&](const Vector& v, float* to) { v.chain(panel.data(), 16, x.data(), kCount, rows, kCount, to); }, rows * 16, start));
    }
    EXPECT(same([&](const Vector& v, float* to) { v.lanes(panel.data(), x.data(), kCount, to); }, 64, start));
    EXPECT(same([&](const Vector& v, float* to) { v.widen_bf16(words.data(), kCount * 16, to); }, kCount * 16, {}));
    EXPECT(same([&](const Vector& v, float* to) { v.widen_half(words.data(), kCount * 16, to); }, kCount * 16, {}));
    EXPECT(same([&](const Vector& v, float* to) { v.widen_e4m3(bytes.data(), kCount * 16, 0.25f, to); }, kCount * 16, {}));
    EXPECT(same([&](const Vector& v, float* to) { v.widen_e2m1(bytes.data(), kCount, start.data(), to); }, kCount * 32, {}));
    EXPECT(same([&](const Vector& v, float* to) { v.widen_e8m0(bytes.data(), to); }, 16, {}));
    std::vector<float> wide(64);
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(i) * 4 - 130;
    EXPECT(same([&](const Vector& v, float* to) { v.exp(to, 64); }, 64, wide));
    EXPECT(same([&](const Vector& v, float* to) { v.exp(to, 33); }, 33, start));
  }
  for (float v = -110; v < 88.5f; v += 0.37f) {
    const double exact = std::exp(static_cast<double>(v));
    EXPECT(std::abs(exp_ulp1(v) - exact) <= 1.2e-7 * exact + 0x1p-148);
  }
  EXPECT(exp_ulp1(-INFINITY) == 0 && std::isinf(exp_ulp1(200.0f)) && std::isnan(exp_ulp1(NAN)));
}

void sums() {
  std::vector<float> ones(1000, 1.0f);
  for (int64_t n : {0, 1, 7, 8, 31, 32, 33, 999, 1000}) {
    EXPECT(sum_in_order(ones.data(), n) == static_cast<float>(n));
    EXPECT(sum_in_order_bf16(ones.data(), n) == static_cast<float>(n));
  }
  EXPECT(chain_end(0, 128) == 128 && chain_end(0, 256) == 128 && chain_end(128, 256) == 256);
  EXPECT(chain_end(0, 1024) == 192 && chain_end(192, 1024) == 384 && chain_end(960, 1024) == 1024);
}

void sampler() {
  const auto zero = philox(0, 0);  // known answer of the paper's reference implementation
  EXPECT(zero[0] == 0x6627e8d5 && zero[1] == 0xe169c58d && zero[2] == 0xbc57ac4c && zero[3] == 0x9b00dbd8);
  const float logits[] = {0.0f, 2.0f, 2.0f, -INFINITY, 1.0f};
  EXPECT(sample(logits, 5, 0, 1, 0, 0) == 1);
  std::set<int> seen;
  int often = 0;
  for (uint64_t draw = 0; draw < 4000; ++draw) {
    const int token = sample(logits, 5, 1, 1, 7, draw);
    EXPECT(token == sample(logits, 5, 1, 1, 7, draw));
    seen.insert(token);
    often += token == 1 || token == 2;
  }
  EXPECT(seen == (std::set<int>{0, 1, 2, 4}));
  const double expected = 2 * std::exp(2.0) / (2 * std::exp(2.0) + std::exp(1.0) + 1);
  EXPECT(std::abs(often / 4000.0 - expected) < 0.03);
  for (uint64_t draw = 0; draw < 200; ++draw) {
    const int token = sample(logits, 5, 1, 0.5, 7, draw);
    EXPECT(token == 1 || token == 2);
    EXPECT(sample(logits, 5, 1, 1e-9, 7, draw) == 1);
  }
  const float nan[] = {0.0f, NAN}, none[] = {-INFINITY, -INFINITY};
  EXPECT(refuses([&] { sample(nan, 2, 0, 1, 0, 0); }));
  EXPECT(refuses([&] { sample(none, 2, 1, 1, 0, 0); }));
  EXPECT(refuses([&] { sample(none, 0, 1, 1, 0, 0); }));
}

void teams() {
  for (int size : {1, 2, 5}) {
    Team team(size, 256);
    std::vector<int> owner(1003);
    std::vector<int64_t> totals(size);
    for (int round = 0; round < 50; ++round) {
      team.run([&](Worker& worker) {
        const Range share = worker.share(1003, 16);
        for (int64_t i = share.begin; i < share.end; ++i) owner[i] = round + worker.rank();
        worker.scratch()[63] = 1;
        worker.barrier();
        int64_t total = 0;
        for (int value : owner) total += value;
        totals[worker.rank()] = total;
        worker.barrier();
      });
      for (int rank = 1; rank < size; ++rank) EXPECT(totals[rank] == totals[0]);
    }
  }
}

void plans() {
  for (const char* bad : {"", "{", "[]", "null", "{}", "{\"format\": 1}", "{\"format\": \"1\"}", "\xff\xfe", "{\"format\": 1e400}"}) {
    EXPECT(refuses([bad] { parse_plan(bad); }));
  }
  EXPECT(refuses([] { parse_plan(std::string(100000, '[')); }));
}

}  // namespace

int main() {
  types();
  formats();
  vectors();
  sums();
  sampler();
  teams();
  plans();
  std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
}
