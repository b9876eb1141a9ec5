#include "charts.h"

#include <algorithm>
#include <cmath>

#include "text.h"

namespace octile::digits {

namespace {

std::string coordinate(double value) { return fixed(value, 1); }

std::string line(double x1, double y1, double x2, double y2, const std::string& style) {
  return "<line class=\"" + style + "\" x1=\"" + coordinate(x1) + "\" y1=\"" + coordinate(y1) + "\" x2=\"" +
         coordinate(x2) + "\" y2=\"" + coordinate(y2) + "\"/>\n";
}

struct TextAt {
  double x, y;
  const char* anchor;
  const char* style = "";
};

std::string text(const TextAt& at, const std::string& what) {
  return "<text x=\"" + coordinate(at.x) + "\" y=\"" + coordinate(at.y) + "\" text-anchor=\"" + at.anchor +
         "\" class=\"" + at.style + "\">" + escaped(what) + "</text>\n";
}

// The frame of a chart within its 720 units of width.
struct Frame {
  double left, right, top, bottom;
};

constexpr double kWidth = 720;

std::string open_chart(double height, const std::string& label) {
  return "<svg class=\"chart\" viewBox=\"0 0 " + fixed(kWidth, 0) + " " + fixed(height, 0) +
         "\" role=\"img\" aria-label=\"" + escaped(label) + "\">\n";
}

std::vector<double> mean_curve(const std::vector<std::vector<double>>& curves) {
  std::vector<double> mean(curves.front().size());
  for (const auto& curve : curves) {
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += curve[i] / static_cast<double>(curves.size());
  }
  return mean;
}

class LossChart {
 public:
  explicit LossChart(const Result& result) : result_(result) {
    double low = 1, high = 1;
    for (const WayResult& way : result.ways) {
      for (const auto& curve : way.curves) {
        for (double loss : curve) {
          if (!drawable(loss)) continue;
          low = std::min(low, loss);
          high = std::max(high, loss);
        }
      }
    }
    low_ = std::floor(std::log10(low));
    // A third of a decade is room enough above 1: the first epoch is seldom worse than guessing, log(10).
    high_ = std::ceil(3 * std::log10(high) + 0.01) / 3;
  }

  std::string svg() const {
    constexpr double kHeight = 392;
    std::string out = open_chart(kHeight, "Training loss of each epoch, on a logarithmic scale");
    for (double decade = low_; decade <= high_; ++decade) {
      out += line(frame_.left, y(decade), frame_.right, y(decade), "grid");
      out += text({frame_.left - 10, y(decade) + 5, "end"}, decade_label(decade));
    }
    const auto epochs = static_cast<std::int64_t>(result_.settings.epochs);
    const std::int64_t tick = std::max<std::int64_t>(1, (epochs + 4) / 5);
    for (std::int64_t epoch = tick; epoch <= epochs; epoch += tick) {
      out += line(x(epoch), frame_.bottom, x(epoch), frame_.bottom + 5, "axis");
      out += text({x(epoch), frame_.bottom + 26, "middle"}, std::to_string(epoch));
    }
    out += line(frame_.left, frame_.bottom, frame_.right, frame_.bottom, "axis");
    out += text({frame_.right, kHeight - 12, "end"}, "epoch");
    out += text({frame_.left, 26, "start"}, "loss");
    for (const WayResult& way : result_.ways) {
      for (const auto& curve : way.curves) out += path(curve, "seed " + str(way.id));
    }
    // The dashed line last, so that the two that share its course are seen through its gaps.
    for (std::size_t way : {0, 2, 1}) {
      out += path(mean_curve(result_.ways[way].curves), "mean " + str(result_.ways[way].id));
    }
    return out + "</svg>\n";
  }

 private:
  static bool drawable(double loss) { return std::isfinite(loss) && loss > 0; }

  static std::string decade_label(double decade) {
    return decade < 0 ? fixed(std::pow(10.0, decade), static_cast<int>(-decade)) : fixed(std::pow(10.0, decade), 0);
  }

  double x(std::int64_t epoch) const {
    const double last = static_cast<double>(std::max<std::int64_t>(2, result_.settings.epochs));
    return frame_.left + 8 + (frame_.right - frame_.left - 16) * static_cast<double>(epoch - 1) / (last - 1);
  }
  double y(double decades) const {
    return frame_.bottom - (frame_.bottom - frame_.top) * (decades - low_) / (high_ - low_);
  }

  std::string path(const std::vector<double>& curve, const std::string& style) const {
    std::string points;
    for (std::size_t i = 0; i < curve.size(); ++i) {
      if (!drawable(curve[i])) continue;
      points += points.empty() ? "M" : "L";
      points += coordinate(x(static_cast<std::int64_t>(i) + 1)) + "," + coordinate(y(std::log10(curve[i])));
    }
    // One epoch is a point: a line of no length with round ends shows it.
    if (curve.size() == 1 && !points.empty()) points += "h0.1";
    return "<path class=\"" + style + "\" d=\"" + points + "\"/>\n";
  }

  const Result& result_;
  const Frame frame_{92, 700, 42, 322};
  double low_ = 0, high_ = 0;  // decades
};

}  // namespace

std::string str(std::string_view text) { return std::string(text); }

std::string loss_chart(const Result& result) { return LossChart(result).svg(); }

std::string accuracy_chart(const std::vector<AccuracyRow>& rows) {
  constexpr double kRow = 44;
  const double height = 60 + kRow * static_cast<double>(rows.size());
  const Frame frame{316, 668, 8, height - 46};
  double low = 100, high = 0;
  for (const AccuracyRow& row : rows) {
    low = std::min(low, row.accuracy.low());
    high = std::max(high, row.accuracy.high());
  }
  // At least a point wide, so that a difference of one image does not look like a gulf.
  double tick = 0.5;
  while ((high - low) / tick > 4) tick *= 2;
  low = std::floor(low / tick) * tick;
  high = std::max(std::ceil(high / tick) * tick, low + 2 * tick);
  const auto x = [&](double accuracy) {
    return frame.left + (frame.right - frame.left) * (accuracy - low) / (high - low);
  };
  std::string out = open_chart(height, "Test accuracy of each way and of each format, one dot for each seed");
  for (double at = low; at <= high + tick / 2; at += tick) {
    out += line(x(at), frame.top, x(at), frame.bottom, "grid");
    out += text({x(at), frame.bottom + 30, "middle"}, fixed(at, tick < 1 ? 1 : 0) + " %");
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const double y = frame.top + kRow * (static_cast<double>(r) + 0.5);
    out += text({8, y + 6, "start", "name"}, str(rows[r].label));
    for (double accuracy : rows[r].accuracy.values) {
      out += "<circle class=\"dot " + str(rows[r].id) + "\" cx=\"" + coordinate(x(accuracy)) + "\" cy=\"" +
             coordinate(y) + "\" r=\"6\"/>\n";
    }
    const double mean = x(rows[r].accuracy.mean());
    out += line(mean, y - 12, mean, y + 12, "mean " + str(rows[r].id));
  }
  return out + "</svg>\n";
}

}  // namespace octile::digits
