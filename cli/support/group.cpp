#include "cli/support/group.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace octile::cli {

namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU, SIGALRM};
struct sigaction before[std::size(kSignals)];

std::atomic<int> ending = 0;  // the first signal that is to end us
std::atomic<bool> timed_out = false;
std::atomic<pid_t> group = 0;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

// In any thread: the numbers of OpenBLAS have some.
extern "C" void end_the_group(int signal) {
  const int error = errno;
  if (signal == SIGALRM) {
    timed_out = true;
  } else if (int none = 0; !ending.compare_exchange_strong(none, signal)) {
    // one is enough
  }
  if (const pid_t running = group; running > 0) kill(-running, SIGKILL);
  errno = error;
}

void set_alarm(double seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(seconds);
  timer.it_value.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
  if (seconds > 0 && timer.it_value.tv_sec == 0)
    timer.it_value.tv_usec = std::max<suseconds_t>(timer.it_value.tv_usec, 1);
  setitimer(ITIMER_REAL, &timer, nullptr);
}

// In the child, before the command: nothing that may take a lock.
[[noreturn]] void become(char* const* words, const char* output, pid_t parent, const sigset_t& mask, int failed) {
  setpgid(0, 0);
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
  if (getppid() != parent) _exit(1);  // it died before this
  signal(SIGTTOU, SIG_IGN);           // a terminal would stop a group in the background that writes
  const int in = open("/dev/null", O_RDONLY), out = *output == '\0' ? -1 : open(output, O_WRONLY | O_CREAT, 0600);
  if (in >= 0) dup2(in, STDIN_FILENO);
  if (out >= 0) dup2(out, STDOUT_FILENO);
  if (out >= 0) dup2(out, STDERR_FILENO);
  // Tiles are on the stack: room for the largest that the language has.
  rlimit stack{};
  constexpr rlim_t kStack = rlim_t{64} << 20;
  if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < kStack) {
    stack.rlim_cur = std::min(kStack, stack.rlim_max);
    setrlimit(RLIMIT_STACK, &stack);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execvp(words[0], words);
  const int error = errno;
  (void)!write(failed, &error, sizeof(error));
  _exit(127);
}

}  // namespace

GroupSignals::GroupSignals() {
  ending = 0;
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    if (before[i].sa_handler == SIG_IGN && kSignals[i] != SIGALRM) continue;
    struct sigaction action {};
    action.sa_handler = end_the_group;
    sigaction(kSignals[i], &action, nullptr);
  }
}

GroupSignals::~GroupSignals() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before[i], nullptr);
  if (came()) raise(ending);
}

bool GroupSignals::came() const { return ending != 0; }

GroupEnd run_group(const std::vector<std::string>& command, double seconds, const std::string& output) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  int failed[2];
  if (pipe2(failed, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot run " + command[0]);

  timed_out = false;
  sigset_t ours, mask;
  sigemptyset(&ours);
  for (const int signal : kSignals) sigaddset(&ours, signal);
  sigprocmask(SIG_BLOCK, &ours, &mask);  // until the handler knows the group
  const pid_t parent = getpid(), child = fork();
  if (child == 0) become(words.data(), output.c_str(), parent, mask, failed[1]);
  int error = child < 0 ? errno : 0;
  close(failed[1]);
  if (child > 0) {
    setpgid(child, child);
    group = child;
    if (ending != 0) kill(-child, SIGKILL);
    set_alarm(seconds);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);

  GroupEnd end;
  if (child > 0) {
    siginfo_t info;
    while (waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
    }
    set_alarm(0);
    group = 0;
    kill(-child, SIGKILL);  // what it has left behind, while its number is still taken
    while (waitpid(child, &end.wait_status, 0) < 0 && errno == EINTR) {
    }
    (void)!read(failed[0], &error, sizeof(error));
  }
  close(failed[0]);
  if (error != 0) throw std::system_error(error, std::generic_category(), "cannot run " + command[0]);
  end.timed_out = timed_out && WIFSIGNALED(end.wait_status);
  return end;
}

}  // namespace octile::cli
