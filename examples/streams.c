/* Two GPUs, or two ranks on one: all-reduces beside a CUDA stream, and in it. The results of the
 * first are waited for by the stream, not by the thread; in between, the program synchronises the
 * whole device while a collective is pending that the other rank has not called yet.
 *
 *   cc -std=c11 streams.c $(unjam config --cflags --libs) -I/usr/local/cuda/include \
 *      -L/usr/local/cuda/lib64 -lcudart -lpthread
 *
 * Without a GPU it says so and ends well.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "unjam/unjam.h"

#define RANKS 2
#define COUNT 1000000

static void check(unjamResult_t result, const char* what) {
  if (result == UNJAM_SUCCESS) return;
  fprintf(stderr, "%s: %s: %s\n", what, unjamGetErrorString(result), unjamGetLastError());
  exit(1);
}

static void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  exit(1);
}

int main(void) {
  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  unjamContext_t contexts[RANKS];
  unjamGroup_t world[RANKS];
  cudaStream_t streams[RANKS];
  float* data[RANKS];
  float* host = malloc(COUNT * sizeof(float));
  int devices = 0, r, i;

  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("no GPU here: nothing to show\n");
    free(host);
    return 0;
  }
  if (host == NULL) return 1;
  config.device = UNJAM_DEVICE_CUDA; /* rank r on GPU r, or modulo how many there are */
  check(unjamInitAll(contexts, RANKS, &config), "init");
  for (r = 0; r < RANKS; ++r) {
    check_cuda(cudaSetDevice(r % devices), "device");
    check(unjamGroupCreate(contexts[r], NULL, 0, "world", &world[r]), "group");
    check_cuda(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking), "stream");
    check_cuda(cudaMalloc((void**)&data[r], COUNT * sizeof(float)), "memory");
  }

  for (r = 0; r < RANKS; ++r) {
    unjamCallOptions_t beside = UNJAM_CALL_OPTIONS_INITIALIZER;
    unjamRequest_t request;
    check_cuda(cudaSetDevice(r % devices), "device");
    for (i = 0; i < COUNT; ++i) host[i] = (float)(r + i % 7);
    check_cuda(
        cudaMemcpyAsync(data[r], host, COUNT * sizeof(float), cudaMemcpyHostToDevice, streams[r]),
        "copy");
    /* It reads the data when the copy is done. The stream goes on beside it. */
    beside.stream = streams[r];
    beside.stream_order = UNJAM_STREAM_ASYNC;
    check(unjamAllReduce(world[r], "sum", data[r], data[r], COUNT, UNJAM_FLOAT32, UNJAM_SUM,
                         &beside, &request),
          "all-reduce");
    /* Returns, although rank 0's call waits for rank 1's. */
    check_cuda(cudaDeviceSynchronize(), "synchronize");
    /* What is queued from here on sees the sums. */
    check(unjamStreamWait(request, streams[r]), "wait");
    check(unjamRequestFree(request), "free");
  }
  for (r = 0; r < RANKS; ++r) {
    /* As a kernel in the stream: the copy below comes after it. */
    unjamCallOptions_t inside = UNJAM_CALL_OPTIONS_INITIALIZER;
    inside.stream = streams[r];
    inside.stream_order = UNJAM_STREAM_SYNC;
    check_cuda(cudaSetDevice(r % devices), "device");
    check(unjamAllReduce(world[r], "twice", data[r], data[r], COUNT, UNJAM_FLOAT32, UNJAM_SUM,
                         &inside, NULL),
          "all-reduce");
  }
  for (r = 0; r < RANKS; ++r) {
    check_cuda(cudaSetDevice(r % devices), "device");
    check_cuda(
        cudaMemcpyAsync(host, data[r], COUNT * sizeof(float), cudaMemcpyDeviceToHost, streams[r]),
        "copy");
    check_cuda(cudaStreamSynchronize(streams[r]), "stream");
    for (i = 0; i < COUNT; ++i) {
      const float expected = (float)(RANKS * (1 + 2 * (i % 7)));
      if (host[i] == expected) continue;
      fprintf(stderr, "rank %d, [%d]: %g, expected %g\n", r, i, host[i], expected);
      return 1;
    }
  }
  for (r = 0; r < RANKS; ++r) {
    check(unjamDestroy(contexts[r]), "destroy");
    check_cuda(cudaFree(data[r]), "free");
    check_cuda(cudaStreamDestroy(streams[r]), "stream");
  }
  free(host);
  printf("%d ranks on %d GPUs, all results right\n", RANKS, devices < RANKS ? devices : RANKS);
  return 0;
}
