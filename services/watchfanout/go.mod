module watershed.dev/services/watchfanout

go 1.26.0

require (
	github.com/nats-io/nats.go v1.55.0
	google.golang.org/grpc v1.83.2
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af
	watershed.dev/platform v0.0.0
	watershed.dev/proto v0.0.0
)

replace watershed.dev/proto => ../../proto

replace watershed.dev/platform => ../../platform
