#include "state_rows.h"

#include <charconv>
#include <cstring>

#include "quantize.h"
#include "rows.h"
#include "vector.h"

namespace rewright {
namespace {

int64_t positive(const CallSite& site, const std::string& text, const std::string& whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  site.require(error == std::errc() && end == text.data() + text.size() && value > 0 && value < int64_t{1} << 31,
               "no format of rows: " + whole);
  return value;
}

// "e4m3:64:448": codes, block, coded.
RowFormat parse_format(const CallSite& site, const std::string& text, int64_t columns) {
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  site.require(first != std::string::npos && second != std::string::npos, "no format of rows: " + text);
  RowFormat format;
  format.codes = codes_named(site, text.substr(0, first));
  format.block = positive(site, text.substr(first + 1, second - first - 1), text);
  format.coded = positive(site, text.substr(second + 1), text);
  format.plain = columns - format.coded;
  site.require(format.plain >= 0 && format.coded % format.block == 0, "rows of this width are not " + text);
  site.require(format.codes == Codes::kE4M3 || format.block % 2 == 0, "blocks of e2m1 codes are even");
  return format;
}

void unpack_e4m3(const uint8_t* codes, int64_t count, float scale, float* out) {
  if (count % kTile == 0) {
    vector().widen_e4m3(codes, count, scale, out);
    return;
  }
  for (int64_t i = 0; i < count; ++i) out[i] = kE4M3[codes[i]] * scale;
}

void unpack_e2m1(const uint8_t* codes, int64_t count, float scale, float* out) {
  int64_t i = 0;
  float scales[kTile];
  std::fill_n(scales, kTile, scale);
  for (; i + 2 * kTile <= count; i += 2 * kTile) {
    float apart[2 * kTile];  // even elements, then odd ones
    vector().widen_e2m1(codes + i / 2, 1, scales, apart);
    for (int j = 0; j < kTile; ++j) {
      out[i + 2 * j] = apart[j];
      out[i + 2 * j + 1] = apart[kTile + j];
    }
  }
  for (; i < count; i += 2) {
    out[i] = kE2M1[codes[i / 2] & 15] * scale;
    out[i + 1] = kE2M1[codes[i / 2] >> 4] * scale;
  }
}

}  // namespace

StateRows::StateRows(const CallSite& site, const Tensor& state, const std::string& format, int64_t columns,
                     DType dtype, const std::string& misfit)
    : state_(state) {
  site.require(state.rank() == 3 && state.dim(0) > 0 && state.dim(1) > 0, misfit);
  if (format.empty()) {
    site.require(state.dtype == dtype && state.cols() == columns, misfit);
    return;
  }
  format_ = parse_format(site, format, columns);
  site.require(dtype == DType::kBF16 && state.dtype == DType::kByte, misfit);
  site.require(state.cols() == format_.row_bytes() && state.pitch == state.cols(), misfit);
}

uint8_t* StateRows::slot(int64_t slot) const { return state_.row<uint8_t>(state_row(state_, slot, 0)); }

void StateRows::load(int64_t slot, int64_t index, float* out) const {
  if (!packed()) {
    load_row(state_, state_row(state_, slot, index), out);
    return;
  }
  const uint8_t* base = this->slot(slot);
  const uint8_t* codes = base + format_.codes_at(size(), index);
  const uint8_t* scales = base + format_.scales_at(size(), index);
  for (int64_t start = 0; start < format_.coded; start += format_.block) {
    const float scale = e8m0_to_float(scales[start / format_.block]);
    if (format_.codes == Codes::kE4M3) {
      unpack_e4m3(codes + start, format_.block, scale, out + start);
    } else {
      unpack_e2m1(codes + start / 2, format_.block, scale, out + start);
    }
  }
  const uint8_t* plain = base + format_.plain_at(index);
  for (int64_t i = 0; i < format_.plain; ++i) {
    uint16_t bits;
    std::memcpy(&bits, plain + 2 * i, sizeof bits);
    out[format_.coded + i] = bf16_to_float(bits);
  }
}

void StateRows::store(int64_t slot, int64_t index, const float* values) const {
  if (!packed()) {
    store_row(state_, state_row(state_, slot, index), values);
    return;
  }
  uint8_t* base = this->slot(slot);
  quantize_row(values, format_.coded, format_.block, format_.codes, base + format_.codes_at(size(), index),
               base + format_.scales_at(size(), index));
  uint8_t* plain = base + format_.plain_at(index);
  for (int64_t i = 0; i < format_.plain; ++i) {
    const uint16_t bits = float_to_bf16(values[format_.coded + i]);
    std::memcpy(plain + 2 * i, &bits, sizeof bits);
  }
}

void StateRows::copy(int64_t slot, int64_t index, const Tensor& rows, int64_t from, float* scratch) const {
  if (!packed()) {
    const int64_t bytes = (rows.cols() * bits_of(rows.dtype) + 7) / 8;
    std::memcpy(state_.row<char>(state_row(state_, slot, index)), rows.row<char>(from), bytes);
    return;
  }
  load_row(rows, from, scratch);
  store(slot, index, scratch);
}

}  // namespace rewright
