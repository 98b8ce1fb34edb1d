#include "reshard/simulate.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace unjam::reshard {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9;  // of a task's size: what is left then is none

// Ports of one direction: out-ports first, then in-ports.
struct Stream {
  std::vector<std::size_t> ports;
  double left = 0, weight = 0, rate = 0;
  double fill = 0;  // until the last receiver has the first piece
};

// Max-min fair: all rates rise together, by their weights, until a port is full; who goes through
// that stays, and so on.
void set_rates(std::vector<Stream>* streams, std::size_t ports) {
  std::vector<double> room(ports, 1), weight(ports, 0);
  std::vector<std::size_t> rising;
  for (std::size_t f = 0; f < streams->size(); ++f) {
    Stream& stream = (*streams)[f];
    stream.rate = 0;
    if (stream.left <= 0) continue;
    rising.push_back(f);
    for (const std::size_t port : stream.ports) weight[port] += stream.weight;
  }
  while (!rising.empty()) {
    double least = kNever;
    for (const std::size_t f : rising) {
      for (const std::size_t port : (*streams)[f].ports) {
        least = std::min(least, room[port] / weight[port]);
      }
    }
    const double full = least * (1 + kRounding);
    std::vector<std::size_t> fixed;
    std::erase_if(rising, [&](std::size_t f) {
      const bool stays =
          std::any_of((*streams)[f].ports.begin(), (*streams)[f].ports.end(),
                      [&](std::size_t port) { return room[port] / weight[port] <= full; });
      if (stays) fixed.push_back(f);
      return stays;
    });
    for (const std::size_t f : fixed) {
      Stream& stream = (*streams)[f];
      stream.rate = least * stream.weight;
      for (const std::size_t port : stream.ports) {
        room[port] = std::max(0.0, room[port] - stream.rate);
        weight[port] -= stream.weight;
      }
    }
  }
}

}  // namespace

double time_in_order(const Tasks& tasks, const Schedule& schedule) {
  std::vector<double> free_at(static_cast<std::size_t>(tasks.ports), 0);
  double end = 0;
  for (const std::size_t t : schedule.order) {
    const Task& task = tasks.tasks[t];
    double start = free_at[static_cast<std::size_t>(schedule.sender[t])];
    for (const int port : task.receivers) {
      start = std::max(start, free_at[static_cast<std::size_t>(port)]);
    }
    const double done = start + static_cast<double>(task.bytes);
    free_at[static_cast<std::size_t>(schedule.sender[t])] = done;
    for (const int port : task.receivers) free_at[static_cast<std::size_t>(port)] = done;
    end = std::max(end, done);
  }
  return end;
}

std::int64_t busiest_port(const Tasks& tasks, const std::vector<int>& sender) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(tasks.ports), 0), in = out;
  std::int64_t most = 0;
  const auto add = [&most](std::vector<std::int64_t>* loads, int port, std::int64_t bytes) {
    std::int64_t& load = (*loads)[static_cast<std::size_t>(port)];
    load += bytes;
    most = std::max(most, load);
  };
  for (std::size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (!task.receivers.empty()) add(&out, sender[t], task.bytes);
    for (std::size_t i = 0; i < task.receivers.size(); ++i) {
      add(&in, task.receivers[i], task.bytes);
      if (i + 1 < task.receivers.size()) add(&out, task.receivers[i], task.bytes);
    }
  }
  return most;
}

double time_all_in_flight(const Tasks& tasks, const std::vector<int>& sender, std::int64_t chunk,
                          bool by_size) {
  const auto ports = static_cast<std::size_t>(tasks.ports);
  std::vector<Stream> streams;
  for (std::size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    Stream stream;
    if (!task.receivers.empty()) {
      stream.fill = static_cast<double>(std::min(task.bytes, chunk) *
                                        static_cast<std::int64_t>(task.receivers.size() - 1));
    }
    stream.left = static_cast<double>(task.bytes);
    stream.weight = by_size ? stream.left : 1;
    if (task.bytes > 0) {
      stream.ports.push_back(static_cast<std::size_t>(sender[t]));
      for (std::size_t i = 0; i < task.receivers.size(); ++i) {
        const auto port = static_cast<std::size_t>(task.receivers[i]);
        stream.ports.push_back(ports + port);
        if (i + 1 < task.receivers.size()) stream.ports.push_back(port);
      }
    }
    streams.push_back(std::move(stream));
  }
  double now = 0, end = 0;
  while (true) {
    set_rates(&streams, 2 * ports);
    double step = kNever;
    for (const Stream& stream : streams) {
      if (stream.left > 0) step = std::min(step, stream.left / stream.rate);
    }
    if (step == kNever) return end;
    now += step;
    for (Stream& stream : streams) {
      if (stream.left <= 0) continue;
      // What ends at nearly this time ends now, or rounding would make a step of its own of it.
      stream.left -= stream.rate * step;
      if (stream.left <= kRounding * now * stream.rate) {
        stream.left = 0;
        end = std::max(end, now + stream.fill);
      }
    }
  }
}

}  // namespace unjam::reshard
