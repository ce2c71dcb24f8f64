// The CUDA driver library that libtorch_cuda links to: every function succeeds and does nothing.
#include <string.h>
int cuCtxGetCurrent(void){return 0;}
int cuCtxSetCurrent(void){return 0;}
int cuDeviceGet(void){return 0;}
int cuDeviceGetAttribute(void){return 0;}
int cuDevicePrimaryCtxRetain(void){return 0;}
int cuFuncGetAttribute(void){return 0;}
int cuFuncSetAttribute(void){return 0;}
int cuFuncSetCacheConfig(void){return 0;}
int cuGetErrorString(void){return 0;}
int cuLaunchCooperativeKernel(void){return 0;}
int cuLaunchKernel(void){return 0;}
int cuLinkAddData_v2(void){return 0;}
int cuLinkComplete(void){return 0;}
int cuLinkCreate_v2(void){return 0;}
int cuModuleGetFunction(void){return 0;}
int cuModuleLoad(void){return 0;}
int cuModuleLoadData(void){return 0;}
int cuModuleLoadDataEx(void){return 0;}
int cuModuleUnload(void){return 0;}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(void){return 0;}
int cuPointerGetAttribute(void){return 0;}
int cuTensorMapEncodeTiled(void){return 0;}
int cuDevicePrimaryCtxGetState(int d,unsigned*f,int*a){ if(f)*f=0; if(a)*a=1; return 0; }
