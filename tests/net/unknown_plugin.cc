// What looks like a network plugin for NCCL, of a version that unjam does not know, or of none.
#if defined(UNJAM_NET_SYMBOL)
extern "C" __attribute__((visibility("default"))) int UNJAM_NET_SYMBOL;
int UNJAM_NET_SYMBOL = 0;
#endif
