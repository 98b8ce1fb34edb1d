// UNJAM_LOG's lines: which are written, into which file, and that they do not mix.
#include "runtime/log.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace unjam {
namespace {

class LogTest : public testing::Test {
 protected:
  LogTest() {
    std::string pattern = testing::TempDir() + "unjam-log-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~LogTest() override { std::filesystem::remove_all(folder_); }
  static std::vector<std::string> lines(const std::string& path) {
    std::ifstream file(path);
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }
  std::string folder_;
};

TEST_F(LogTest, LinesAboveTheLevelAreNotMade) {
  Log log(folder_ + "/log");
  int made = 0;
  const auto text = [&] { return "line " + std::to_string(++made); };
  log.say(LogLevel::kWarn, 0, text);
  log.say(LogLevel::kInfo, 0, text);
  log.say(LogLevel::kDebug, 0, text);
  EXPECT_EQ(made, 1);
  log.set_level(LogLevel::kInfo);
  log.say(LogLevel::kInfo, 0, text);
  log.say(LogLevel::kDebug, 0, text);
  EXPECT_EQ(made, 2);
  const auto all = lines(folder_ + "/log");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[0].starts_with("unjam: ") && all[0].ends_with(" warn: line 1")) << all[0];
  EXPECT_TRUE(all[1].ends_with(" info: line 2")) << all[1];
}

TEST_F(LogTest, FilesAreNamedByRankProcessAndHost) {
  Log log(folder_ + "/%h-%p-%r-%%-%x%");
  log.say(LogLevel::kWarn, 3, [] { return "of rank 3"; });
  log.say(LogLevel::kWarn, 12, [] { return "of rank 12"; });
  std::string host(256, '\0');
  ASSERT_EQ(gethostname(host.data(), host.size()), 0);
  const std::string head = folder_ + "/" + host.c_str() + "-" + std::to_string(getpid()) + "-";
  EXPECT_EQ(lines(head + "3-%-%x%").size(), 1u);
  EXPECT_EQ(lines(head + "12-%-%x%").size(), 1u);
}

TEST_F(LogTest, FilesAreAppendedTo) {
  for (int i = 0; i < 2; ++i) {
    Log log(folder_ + "/log");
    log.say(LogLevel::kWarn, 0, [] { return "once more"; });
  }
  EXPECT_EQ(lines(folder_ + "/log").size(), 2u);
}

TEST_F(LogTest, NamesCannotForgeLines) {
  Log log(folder_ + "/log");
  log.say(LogLevel::kWarn, 0, [] { return "group 'g\nunjam: forged\x1b[2J\x7f'"; });
  const auto all = lines(folder_ + "/log");
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all[0].ends_with(R"( warn: group 'g\x0aunjam: forged\x1b[2J\x7f')")) << all[0];
}

// A pipe that nobody reads takes so much and no more; then lines are lost, and nobody waits.
class Pipe {
 public:
  Pipe() {
    EXPECT_EQ(pipe(ends_), 0);
    saved_ = dup(STDERR_FILENO);
    dup2(ends_[1], STDERR_FILENO);
    close(ends_[1]);
  }
  ~Pipe() {
    restore();
    close(ends_[0]);
  }
  void restore() {
    if (saved_ < 0) return;
    dup2(saved_, STDERR_FILENO);
    close(std::exchange(saved_, -1));
  }
  std::string read_all() {
    std::string all;
    char buffer[4096];
    pollfd polled{ends_[0], POLLIN, 0};
    while (poll(&polled, 1, 0) == 1 && (polled.revents & POLLIN) != 0) {
      const ssize_t n = read(ends_[0], buffer, sizeof(buffer));
      if (n <= 0) break;
      all.append(buffer, static_cast<std::size_t>(n));
    }
    return all;
  }

 private:
  int ends_[2] = {-1, -1};
  int saved_ = -1;
};

TEST_F(LogTest, AFullPipeLosesLinesAndSaysSo) {
  Pipe pipe;
  Log log("");
  constexpr int kLines = 2000;
  for (int i = 0; i < kLines; ++i) {
    log.say(LogLevel::kWarn, 0,
            [&] { return "line " + std::to_string(i) + std::string(100, '.'); });
  }
  const std::string before = pipe.read_all();
  log.say(LogLevel::kWarn, 0, [] { return "once there is room"; });
  const std::string after = pipe.read_all();
  pipe.restore();
  const auto taken = std::count(before.begin(), before.end(), '\n');
  EXPECT_GT(taken, 0);
  EXPECT_LT(taken, kLines);
  EXPECT_NE(after.find("warn: once there is room\n"), std::string::npos) << after;
  EXPECT_NE(after.find(std::to_string(kLines - taken) + " line(s) before this one are lost"),
            std::string::npos)
      << after;
}

TEST_F(LogTest, AStderrThatIsClosedOrReplacedIsNoReasonToEnd) {
  Log log("");
  {
    Pipe first;
    log.say(LogLevel::kWarn, 0, [] { return "to the first"; });
    const std::string said = first.read_all();
    first.restore();
    EXPECT_NE(said.find("to the first"), std::string::npos);
  }
  Pipe second;
  log.say(LogLevel::kWarn, 0, [] { return "to the second"; });
  std::string said = second.read_all();
  second.restore();
  EXPECT_NE(said.find("to the second"), std::string::npos);
}

TEST_F(LogTest, AFifoWithoutAReaderIsNotWaitedFor) {
  const std::string path = folder_ + "/fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  Log log(path);
  testing::internal::CaptureStderr();
  log.say(LogLevel::kWarn, 0, [] { return "to whoever reads"; });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("cannot open '" + path + "'"), std::string::npos) << said;
  EXPECT_NE(said.find("to whoever reads"), std::string::npos) << said;
}

TEST_F(LogTest, AFileThatCannotBeOpenedIsNamedOnceAndLosesNothing) {
  Log log(folder_ + "/none/log");
  testing::internal::CaptureStderr();
  log.say(LogLevel::kWarn, 0, [] { return "first"; });
  log.say(LogLevel::kWarn, 0, [] { return "second"; });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("cannot open '" + folder_ + "/none/log'"), std::string::npos) << said;
  EXPECT_EQ(said.find("cannot open"), said.rfind("cannot open")) << said;
  EXPECT_NE(said.find("first"), std::string::npos) << said;
  EXPECT_NE(said.find("second"), std::string::npos) << said;
}

// Two logs of one file stand for two processes, whose lines only one write() each keeps whole.
TEST_F(LogTest, LinesOfSeveralThreadsAndLogsStayWhole) {
  constexpr int kThreads = 4, kLines = 200;
  Log first(folder_ + "/log"), second(folder_ + "/log");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Log& log = t % 2 == 0 ? first : second;
      for (int i = 0; i < kLines; ++i) {
        log.say(LogLevel::kWarn, t, [&] { return std::string(100, static_cast<char>('a' + t)); });
        log.set_level(i % 2 == 0 ? LogLevel::kInfo : LogLevel::kWarn);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  const auto all = lines(folder_ + "/log");
  ASSERT_EQ(all.size(), std::size_t{kThreads} * kLines);
  for (const std::string& line : all) {
    const std::string tail = line.substr(line.size() - 100);
    EXPECT_EQ(std::count(tail.begin(), tail.end(), tail[0]), 100) << line;
    EXPECT_TRUE(line.starts_with("unjam: ")) << line;
  }
}

}  // namespace
}  // namespace unjam
