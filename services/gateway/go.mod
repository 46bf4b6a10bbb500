module watershed.dev/services/gateway

go 1.26.0

require (
	google.golang.org/grpc v1.83.2
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af
	k8s.io/api v0.36.3
	k8s.io/apiextensions-apiserver v0.36.3
	k8s.io/apimachinery v0.36.3
	k8s.io/apiserver v0.36.3
	k8s.io/client-go v0.36.3
	k8s.io/component-base v0.36.3
	k8s.io/kube-aggregator v0.36.3
	k8s.io/streaming v0.36.3
	watershed.dev/platform v0.0.0
	watershed.dev/proto v0.0.0
)

replace watershed.dev/proto => ../../proto

replace watershed.dev/platform => ../../platform
