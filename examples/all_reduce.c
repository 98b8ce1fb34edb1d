/* Four ranks as threads of this program run two all-reduces, every rank in an order of its own.
 * With a library whose collectives hold what they wait with, ranks 0 and 1 would wait for each
 * other for ever; here each pair of calls finds itself.
 *
 *   cc -std=c11 all_reduce.c $(unjam config --cflags --libs) -lpthread && ./a.out
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "unjam/unjam.h"

#define RANKS 4
#define COUNT 1000

static void check(unjamResult_t result, const char* what) {
  if (result == UNJAM_SUCCESS) return;
  fprintf(stderr, "%s: %s: %s\n", what, unjamGetErrorString(result), unjamGetLastError());
  exit(1);
}

static void* rank_main(void* argument) {
  unjamContext_t context = argument;
  unjamGroup_t world;
  unjamRequest_t request[2];
  float data[2][COUNT];
  const char* const keys[2] = {"gradients", "statistics"};
  int rank, i, k;

  check(unjamContextRank(context, &rank), "rank");
  check(unjamGroupCreate(context, NULL, 0, "world", &world), "group");
  for (k = 0; k < 2; ++k)
    for (i = 0; i < COUNT; ++i) data[k][i] = (float)(rank + k + i % 7);

  for (i = 0; i < 2; ++i) {
    k = (rank + i) % 2; /* odd ranks call "statistics" first */
    check(unjamAllReduce(world, keys[k], data[k], data[k], COUNT, UNJAM_FLOAT32, UNJAM_SUM, NULL,
                         &request[k]),
          "all-reduce");
    /* Returns although the collective may still wait for its peers. */
    check(unjamDeviceSynchronize(context, -1), "synchronize");
  }
  for (k = 0; k < 2; ++k) {
    check(unjamWait(request[k], 30 * 1000 * 1000), "wait");
    check(unjamRequestFree(request[k]), "free");
    for (i = 0; i < COUNT; ++i) {
      const float expected = (float)(RANKS * (RANKS - 1) / 2 + RANKS * (k + i % 7));
      if (data[k][i] != expected) {
        fprintf(stderr, "rank %d, %s[%d]: %g, expected %g\n", rank, keys[k], i, data[k][i],
                expected);
        exit(1);
      }
    }
  }
  return NULL;
}

int main(void) {
  unjamContext_t contexts[RANKS];
  pthread_t threads[RANKS];
  int r;

  check(unjamInitAll(contexts, RANKS, NULL), "init");
  for (r = 0; r < RANKS; ++r)
    if (pthread_create(&threads[r], NULL, rank_main, contexts[r]) != 0) return 1;
  for (r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
  for (r = 0; r < RANKS; ++r) check(unjamDestroy(contexts[r]), "destroy");
  printf("%d ranks, two orders, all results right\n", RANKS);
  return 0;
}
